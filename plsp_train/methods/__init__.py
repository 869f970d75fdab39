"""Methods of partial-label learning behind one interface."""

from plsp_train.methods.base import Iteration, Method, Stage
from plsp_train.methods.cavl import CAVL
from plsp_train.methods.cc import CC
from plsp_train.methods.df import DF
from plsp_train.methods.lws import LWS
from plsp_train.methods.pico import PiCO
from plsp_train.methods.plsp import PLSP
from plsp_train.methods.proden import PRODEN
from plsp_train.methods.rc import RC
from plsp_train.methods.task import Batch, Task, View
from plsp_train.registry import Registry

__all__ = ["DF", "METHODS", "PLSP", "Batch", "Iteration", "Method", "Stage", "Task", "View", "build_method"]

METHODS: Registry[type[Method]] = Registry("method")
for _method in (CC, RC, PRODEN, LWS, CAVL, PiCO, DF, PLSP):  # in the order of the paper's tables
    METHODS.register(_method.name)(_method)


def build_method(task: Task) -> Method:
    """The method that the task's settings name."""
    return METHODS[task.config.method](task)
