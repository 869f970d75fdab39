"""Methods of partial-label learning behind one interface."""

from plsp_train.methods.base import Iteration, Method, Stage
from plsp_train.methods.cavl import CAVL
from plsp_train.methods.cc import CC
from plsp_train.methods.crdpll import CRDPLL
from plsp_train.methods.df import DF
from plsp_train.methods.lws import LWS, LWS_SURROGATES
from plsp_train.methods.pico import PiCO
from plsp_train.methods.plsp import PLSP
from plsp_train.methods.proden import PRODEN
from plsp_train.methods.rc import RC
from plsp_train.methods.supervised import Supervised
from plsp_train.methods.task import Batch, Task, View
from plsp_train.registry import Registry

__all__ = [
    "DF",
    "LWS_SURROGATES",
    "METHODS",
    "PLSP",
    "Batch",
    "Iteration",
    "Method",
    "Stage",
    "Task",
    "View",
    "build_method",
]

METHODS: Registry[type[Method]] = Registry("method")
# In the order of the paper's tables, with what they lack before and after.
for _method in (CC, RC, PRODEN, LWS, CAVL, PiCO, CRDPLL, DF, PLSP, Supervised):
    METHODS.register(_method.name)(_method)


def build_method(task: Task) -> Method:
    """The method that the task's settings name."""
    return METHODS[task.config.method](task)
