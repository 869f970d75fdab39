"""`python -m plsp_train`."""

import sys

if __name__ == "__main__":
    try:
        from plsp_train.cli import main
    except ModuleNotFoundError as error:
        # The library installs without what only the trainer needs.
        print(f"plsp_train: error: {error}: pip install 'plsp[train]'", file=sys.stderr)
        sys.exit(2)
    sys.exit(main())
