"""`python -m plsp_train.report`."""

from plsp_train.command import run_command

if __name__ == "__main__":
    run_command("plsp_train.report", "plsp_train.report.cli")
