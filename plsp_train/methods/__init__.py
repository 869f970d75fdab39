"""Methods of learning from partial labels, behind one interface that the engine drives."""

from plsp_train.methods.base import Method, Stage, Step, Task
from plsp_train.methods.plsp import PLSP

__all__ = ["PLSP", "Method", "Stage", "Step", "Task", "build_method"]


def build_method(task: Task) -> Method:
    """The method that the task's settings ask for."""
    return PLSP(task)
