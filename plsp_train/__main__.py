"""`python -m plsp_train`."""

from plsp_train.command import run_command

if __name__ == "__main__":
    run_command("plsp_train", "plsp_train.cli")
