"""Methods of learning from partial labels, behind one interface that the engine drives."""

from plsp_train.methods.base import Method, Stage, Step, Task
from plsp_train.methods.plsp import PLSP

__all__ = ["PLSP", "Method", "Stage", "Step", "Task"]
