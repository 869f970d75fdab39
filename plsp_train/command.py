"""Entry point shared by the commands of this package."""

import importlib
import sys
from typing import NoReturn

# The library installs without these.
_TRAINER_MODULES = ("matplotlib", "PIL", "scipy", "sklearn", "torchvision", "tqdm")


def run_command(name: str, module: str) -> NoReturn:
    """Run the module's main() and exit with its code."""
    try:
        main = importlib.import_module(module).main
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        print(f"{name}: error: {explain_import(error)}", file=sys.stderr)
        sys.exit(2)
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before or after training, which handles signals itself
        sys.exit(130)


def explain_import(error: ImportError) -> str:
    """The error, with the command that installs what is missing if it is a dependency of the trainer."""
    package = (error.name or "").partition(".")[0]
    return f"{error}: pip install 'plsp[train]'" if package in _TRAINER_MODULES else str(error)
