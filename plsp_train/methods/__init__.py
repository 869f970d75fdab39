"""Methods of learning from partial labels, behind one interface that the engine drives."""

from collections.abc import Callable

from plsp_train.methods.base import Method, Stage, Step, Task
from plsp_train.methods.cavl import CAVL
from plsp_train.methods.cc import CC
from plsp_train.methods.df import DF
from plsp_train.methods.lws import LWS
from plsp_train.methods.pico import PiCO
from plsp_train.methods.plsp import PLSP
from plsp_train.methods.proden import PRODEN
from plsp_train.methods.rc import RC

__all__ = ["METHODS", "PLSP", "Method", "Stage", "Step", "Task", "build_method"]

METHODS: dict[str, Callable[[Task], Method]] = {
    "plsp": PLSP,
    "df": DF,
    "cc": CC,
    "rc": RC,
    "proden": PRODEN,
    "lws": LWS,
    "cavl": CAVL,
    "pico": PiCO,
}


def build_method(task: Task) -> Method:
    """The method that the task's settings ask for."""
    return METHODS[task.config.method](task)
