"""pytest plugin: Triton kernels of the tests run as compiled PTX.

PYTHONPATH=tests/ptx python -m pytest -p emulator.plugin --ptx-target sm_80 tests/kernels/test_triton.py
"""

import contextlib

import pytest

from emulator.launch import TARGETS, Emulator
from emulator.machine import Mode

_EMULATOR = pytest.StashKey[Emulator]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ptx", "Triton kernels as compiled PTX")
    group.addoption("--ptx-target", choices=TARGETS, default="sm_80", help="GPU to compile for (default: sm_80)")
    group.addoption(
        "--ptx-warps",
        choices=("together", "ascending", "descending"),
        default="together",
        help="order of the warps of a program between barriers (default: together)",
    )
    group.addoption(
        "--ptx-pessimistic",
        action="store_true",
        help="approximate instructions err as far as PTX allows, matrix instructions truncate",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module imports Triton, and with it the kernels."""
    mode = Mode(config.getoption("ptx_pessimistic"), config.getoption("ptx_warps"))
    config.stash[_EMULATOR] = Emulator(config.getoption("ptx_target"), mode)
    serving = contextlib.ExitStack()
    serving.enter_context(config.stash[_EMULATOR].serving_launches())
    config.add_cleanup(serving.close)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    emulator = config.stash[_EMULATOR]
    terminalreporter.section(f"executed as PTX of {emulator.target}")
    for name, done in sorted(emulator.statistics.items()):
        terminalreporter.write_line(
            f"{name}: {done.launches} launches, {done.programs} programs, {len(done.binaries)} binaries, "
            f"{done.seconds:.1f} s"
        )
