"""`python -m plsp_train.sweep`."""

from plsp_train.command import run_command

if __name__ == "__main__":
    run_command("plsp_train.sweep", "plsp_train.sweep.cli")
