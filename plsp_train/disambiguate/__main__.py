"""`python -m plsp_train.disambiguate`."""

from plsp_train.command import run_command

if __name__ == "__main__":
    run_command("plsp_train.disambiguate", "plsp_train.disambiguate.cli")
