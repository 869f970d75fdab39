"""Entry point and parser shared by the commands of this package."""

import argparse
import importlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

# The library installs without these.
_TRAINER_MODULES = ("matplotlib", "PIL", "scipy", "sklearn", "torchvision", "tqdm")
# In messages of torch's RuntimeErrors.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "bad_alloc")


class Parser(argparse.ArgumentParser):
    """Its errors are one line instead of the usage of all options."""

    def error(self, message: str) -> NoReturn:
        self.tell(f"{self.prog.removeprefix('python -m ')}: error: {message}; --help lists the options")
        sys.exit(2)

    def tell(self, text: str) -> None:
        print(text, file=sys.stderr)


def run_command(name: str, module: str) -> NoReturn:
    """Run the module's main() and exit with its code."""
    _prepare_output()
    try:
        with _interrupt_ends_process():
            main = importlib.import_module(module).main
    except ModuleNotFoundError as error:
        print(f"{name}: error: {explain_import(error)}", file=sys.stderr)
        sys.exit(2)
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before or after training, which handles signals itself
        sys.exit(130)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        print(
            f"{name}: error: out of memory: use smaller batches or inputs; a run resumes from its checkpoint",
            file=sys.stderr,
        )
        sys.exit(1)


def _prepare_output() -> None:
    """Let no text fail to print: not where the encoding lacks a character, nor without a standard output."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed, as some daemons start their programs
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as the process runs
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def _interrupt_ends_process() -> Iterator[None]:
    """Let Ctrl-C end the process without a word. In an import, KeyboardInterrupt may surface as any other exception."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # someone has decided otherwise, as nohup does
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, NumPy, torch's CPU allocator or a GPU's has run out of memory."""
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in _OUT_OF_MEMORY)


def explain_import(error: ImportError) -> str:
    """The error, with the command that installs what is missing if it is a dependency of the trainer."""
    package = (error.name or "").partition(".")[0]
    return f"{error}: pip install 'plsp[train]'" if package in _TRAINER_MODULES else str(error)
