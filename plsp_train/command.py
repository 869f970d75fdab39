"""How the commands of this package start."""

import importlib
import sys
from typing import NoReturn


def run_command(name: str, module: str) -> NoReturn:
    """Run the module's main() and exit with its code."""
    try:
        main = importlib.import_module(module).main
    except ModuleNotFoundError as error:
        # The library installs without what only the trainer needs.
        print(f"{name}: error: {error}: pip install 'plsp[train]'", file=sys.stderr)
        sys.exit(2)
    sys.exit(main())
