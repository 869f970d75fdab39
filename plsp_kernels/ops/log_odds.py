"""plsp::log_odds, plsp::target_log_odds and their autograd functions."""

from typing import Any

import torch
from torch import Tensor

from plsp_kernels.ops.registration import define_operator, first_order_only


def _fake_log_odds(logits: Tensor, gram: Tensor, slots: Tensor, strength: Tensor, impl: str) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def fake_gradients(logits: Tensor, gram: Tensor, need_logits: bool, need_gram: bool) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(logits, memory_format=torch.contiguous_format) if need_logits else logits.new_empty(0),
        torch.empty_like(gram, memory_format=torch.contiguous_format) if need_gram else gram.new_empty(0),
    )


def _fake_log_odds_backward(
    grad_odds: Tensor,
    logits: Tensor,
    odds: Tensor,
    gram: Tensor,
    slots: Tensor,
    strength: Tensor,
    need_logits: bool,
    need_gram: bool,
    impl: str,
) -> tuple[Tensor, Tensor]:
    return fake_gradients(logits, gram, need_logits, need_gram)


def _fake_target_log_odds(
    logits: Tensor, gram: Tensor, slots: Tensor, targets: Tensor, strength: Tensor, impl: str
) -> Tensor:
    return logits.new_empty(logits.shape[0])


def _fake_target_log_odds_backward(
    grad_odds: Tensor,
    logits: Tensor,
    odds: Tensor,
    gram: Tensor,
    slots: Tensor,
    targets: Tensor,
    strength: Tensor,
    need_logits: bool,
    need_gram: bool,
    impl: str,
) -> tuple[Tensor, Tensor]:
    return fake_gradients(logits, gram, need_logits, need_gram)


log_odds = define_operator(
    "log_odds(Tensor logits, Tensor gram, Tensor slots, Tensor strength, str impl) -> Tensor", _fake_log_odds
)
log_odds_backward = define_operator(
    "log_odds_backward(Tensor grad_odds, Tensor logits, Tensor odds, Tensor gram, Tensor slots, Tensor strength,"
    " bool need_logits, bool need_gram, str impl) -> (Tensor, Tensor)",
    _fake_log_odds_backward,
)
target_log_odds = define_operator(
    "target_log_odds(Tensor logits, Tensor gram, Tensor slots, Tensor targets, Tensor strength, str impl) -> Tensor",
    _fake_target_log_odds,
)
target_log_odds_backward = define_operator(
    "target_log_odds_backward(Tensor grad_odds, Tensor logits, Tensor odds, Tensor gram, Tensor slots, Tensor targets,"
    " Tensor strength, bool need_logits, bool need_gram, str impl) -> (Tensor, Tensor)",
    _fake_target_log_odds_backward,
)


class LogOdds(torch.autograd.Function):
    """Semantic log-odds of every class: log p = logsigmoid(odds), log(1 - p) = logsigmoid(-odds)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, gram: Tensor, slots: Tensor, strength: Tensor, impl: str) -> Tensor:
        odds = log_odds(logits, gram, slots, strength, impl)
        ctx.save_for_backward(logits, odds, gram, slots, strength)
        ctx.impl = impl
        return odds

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_odds: Tensor) -> tuple[Tensor | None, ...]:
        need_logits, need_gram = ctx.needs_input_grad[:2]
        grad_logits, grad_gram = log_odds_backward(grad_odds, *ctx.saved_tensors, need_logits, need_gram, ctx.impl)
        return grad_logits if need_logits else None, grad_gram if need_gram else None, None, None, None


class TargetLogOdds(torch.autograd.Function):
    """Semantic log-odds of one class per sample, at the cost of one column instead of all."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, gram: Tensor, slots: Tensor, targets: Tensor, strength: Tensor, impl: str
    ) -> Tensor:
        odds = target_log_odds(logits, gram, slots, targets, strength, impl)
        ctx.save_for_backward(logits, odds, gram, slots, targets, strength)
        ctx.impl = impl
        return odds

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_odds: Tensor) -> tuple[Tensor | None, ...]:
        need_logits, need_gram = ctx.needs_input_grad[:2]
        grad_logits, grad_gram = target_log_odds_backward(
            grad_odds, *ctx.saved_tensors, need_logits, need_gram, ctx.impl
        )
        return grad_logits if need_logits else None, grad_gram if need_gram else None, None, None, None, None
