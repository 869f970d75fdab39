"""`python -m plsp_train.predict`."""

from plsp_train.command import run_command

if __name__ == "__main__":
    run_command("plsp_train.predict", "plsp_train.predict.cli")
