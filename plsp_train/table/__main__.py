"""`python -m plsp_train.table`."""

from plsp_train.command import run_command

if __name__ == "__main__":
    run_command("plsp_train.table", "plsp_train.table.cli")
