"""plsp::log_odds and its autograd function."""

from typing import Any

import torch
from torch import Tensor

from plsp_kernels.ops.registration import define_operator, first_order_only
from plsp_kernels.rows import Rows


def fake_gradients(logits: Tensor, weight: Tensor, need_logits: bool, need_weight: bool) -> tuple[Tensor, Tensor]:
    """Return two gradients with the shapes of the logits and of gram; those not needed are empty."""
    return (
        torch.empty_like(logits, memory_format=torch.contiguous_format) if need_logits else logits.new_empty(0),
        torch.empty_like(weight, memory_format=torch.contiguous_format) if need_weight else weight.new_empty(0),
    )


def _fake_log_odds(rows: Rows) -> Tensor:
    return torch.empty_like(rows.logits, memory_format=torch.contiguous_format)


def _fake_backward(rows: Rows, *args: Any) -> tuple[Tensor, Tensor]:
    need_logits, need_gram = args[-2:]
    return fake_gradients(rows.logits, rows.gram, need_logits, need_gram)


ROW_TENSORS = {"logits": "float N l", "gram": "float U l l", "slots": "int64 N", "strength": "float ()"}
log_odds = define_operator(
    "log_odds(Tensor logits, Tensor gram, Tensor slots, Tensor strength, str impl) -> Tensor",
    _fake_log_odds,
    ROW_TENSORS,
    Rows,
)
log_odds_backward = define_operator(
    "log_odds_backward(Tensor logits, Tensor gram, Tensor slots, Tensor strength, Tensor log_odds,"
    " Tensor grad_log_odds, bool need_logits, bool need_gram, str impl) -> (Tensor, Tensor)",
    _fake_backward,
    ROW_TENSORS | {"log_odds": "float N l", "grad_log_odds": "float N l"},
    Rows,
)


class LogOdds(torch.autograd.Function):
    """Semantic log-odds o of every class: log p = logsigmoid(o), log(1 - p) = logsigmoid(-o)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, gram: Tensor, slots: Tensor, strength: Tensor, impl: str) -> Tensor:
        result = log_odds(logits, gram, slots, strength, impl)
        ctx.save_for_backward(logits, gram, slots, strength, result)
        ctx.impl = impl
        return result

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        need_logits, need_gram = ctx.needs_input_grad[:2]
        grad_logits, grad_gram = log_odds_backward(*ctx.saved_tensors, grad, need_logits, need_gram, ctx.impl)
        return grad_logits if need_logits else None, grad_gram if need_gram else None, None, None, None
