"""The semantic cross-entropy: options, accuracy where it is hard to have, chunks and other devices.

`test_functional.py` compares its mean with the reference on the grid of shapes. Tolerances are the ones given there.
"""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import plsp_kernels
from cases import KINDS, STRENGTH, Elsewhere, Problem, assert_error_rule, assert_same, make_problem
from plsp_kernels import torch_impl
from plsp_kernels.batch import LabeledBatch
from plsp_kernels.torch_impl import chunks

REDUCTIONS = ("mean", "sum", "none")
LOW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IGNORED = -100
# class weights, label smoothing, ignored label: every pair of values occurs
OPTIONS = [(False, 0.0, IGNORED), (True, 0.1, IGNORED), (True, 0.0, 2), (False, 0.2, 2), (False, 1.0, IGNORED)]


def entropy(problem: Problem, weighted: bool, label_smoothing: float, ignore_index: int, **options) -> Tensor:
    labels = problem.labels.clone()
    if ignore_index == IGNORED:
        labels[1] = IGNORED
    return plsp_kernels.semantic_cross_entropy(
        problem.labeled_logits,
        problem.weight,
        problem.covariance,
        labels,
        class_weight=problem.class_thresholds if weighted else None,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        **{"strength": STRENGTH, "impl": "torch", **options},
    )


def evaluate(problem: Problem, *options, **named) -> list[Tensor]:
    """The loss, and its gradients for an upstream gradient of mixed signs."""
    problem = problem.leaves(("labeled_logits", "weight"))
    loss = entropy(problem, *options, **named)
    upstream = ((torch.arange(loss.numel()) % 7 - 3.5).view(loss.shape) / 4).to(loss.dtype)
    return [loss.detach(), *torch.autograd.grad(loss, (problem.labeled_logits, problem.weight), upstream)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_options_equal_the_reference_in_float64(kind, reduction, options):
    for shape in ((17, 0, 7, 19), (9, 0, 41, 130)):
        problem = make_problem(*shape, kind=kind)
        truth = evaluate(problem, *options, reduction=reduction, impl="reference")
        for found, wanted in zip(evaluate(problem, *options, reduction=reduction), truth, strict=True):
            assert_same(found, wanted)


@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_lower_precision_is_as_accurate_as_the_reference(kind, dtype, options):
    problem = make_problem(17, 0, 41, 84, kind=kind, dtype=dtype)
    truth = evaluate(problem.to(torch.float64), *options, reduction="none", impl="reference")
    rival = evaluate(problem, *options, reduction="none", impl="reference")
    found = evaluate(problem, *options, reduction="none")
    for slack, *results in zip((4, 64, 64), found, rival, truth, strict=True):
        assert_error_rule(*results, slack)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_without_strength_it_is_the_cross_entropy_of_pytorch(kind, reduction, options):
    weighted, label_smoothing, ignore_index = options
    problem = make_problem(9, 0, kind=kind)
    labels = problem.labels.clone()
    if ignore_index == IGNORED:
        labels[1] = IGNORED
    expected = F.cross_entropy(
        problem.labeled_logits,
        labels,
        weight=problem.class_thresholds if weighted else None,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )
    assert_same(entropy(problem, *options, strength=0.0, reduction=reduction), expected)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_do_not_depend_on_which_others_are_needed(kind, reduction):
    problem = make_problem(9, 0, kind=kind)
    both = evaluate(problem, *OPTIONS[1], reduction=reduction)
    for position, name in enumerate(("labeled_logits", "weight"), start=1):
        alone = problem.leaves((name,))
        loss = entropy(alone, *OPTIONS[1], reduction=reduction)
        upstream = ((torch.arange(loss.numel()) % 7 - 3.5).view(loss.shape) / 4).to(loss.dtype)
        (gradient,) = torch.autograd.grad(loss, (getattr(alone, name),), upstream)
        assert torch.equal(gradient, both[position])
    assert not entropy(problem, *OPTIONS[1], reduction=reduction).requires_grad


def test_logits_and_weight_may_differ_in_precision():
    problem = make_problem(9, 0, dtype=torch.float32)
    logits = problem.labeled_logits.bfloat16().requires_grad_()
    weight = problem.weight.clone().requires_grad_()
    samples = logits, weight, problem.covariance, problem.labels
    loss = plsp_kernels.semantic_cross_entropy(*samples, strength=STRENGTH)
    loss.backward()
    assert (loss.dtype, logits.grad.dtype, weight.grad.dtype) == (torch.float32, torch.bfloat16, torch.float32)


# --- accuracy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "num_classes"), [("diagonal", 12), ("full", 3)])
def test_two_thousand_features_are_as_accurate_as_the_reference(kind, num_classes):
    problem = make_problem(9, 0, num_classes, 2048, kind=kind, dtype=torch.float32)
    truth, rival = (
        evaluate(given, *OPTIONS[0], reduction="none", impl="reference")
        for given in (problem.to(torch.float64), problem)
    )
    for slack, *results in zip(
        (4, 64, 64), evaluate(problem, *OPTIONS[0], reduction="none"), rival, truth, strict=True
    ):
        assert_error_rule(*results, slack)


def test_features_in_chunks_are_as_accurate_as_the_reference(monkeypatch):
    """The squares of the weight come in chunks of features, here of at most five."""
    problem = make_problem(9, 0, 12, 83, kind="diagonal", dtype=torch.float32)
    monkeypatch.setattr(chunks, "PAIR_BYTES", 4 * 12 * 5)
    truth, rival = (evaluate(given, *OPTIONS[0], impl="reference") for given in (problem.to(torch.float64), problem))
    for slack, *results in zip((4, 64, 64), evaluate(problem, *OPTIONS[0]), rival, truth, strict=True):
        assert_error_rule(*results, slack)


@pytest.mark.parametrize("kind", KINDS)
def test_nearly_equal_rows_far_from_all_others_do_not_cancel(kind):
    """Only the two rows compete; their expanded quadratic form would subtract numbers a million times larger."""
    problem = make_problem(17, 0, 7, 84, kind=kind, dtype=torch.float32)
    problem.weight[2] += 30.0
    problem.weight[5] = problem.weight[2] * (1 + 1e-3)
    problem.labels[:8], problem.labels[8:] = 2, 5
    problem.labeled_logits[:, [0, 1, 3, 4, 6]] = -math.inf
    form = plsp_kernels.pairwise_quadratic_form(problem.weight, problem.covariance, impl="reference")[2, 2]
    assert form.max() > 1e4 * form[5] > 1
    options = {"strength": 2.0, "reduction": "none"}
    truth, rival = (
        evaluate(given, *OPTIONS[0], impl="reference", **options) for given in (problem.to(torch.float64), problem)
    )
    for slack, *results in zip((4, 64, 64), evaluate(problem, *OPTIONS[0], **options), rival, truth, strict=True):
        assert_error_rule(*results, slack)


def test_small_losses_keep_their_relative_precision():
    """Far inside the region of its class, a loss of 1e-13 is not rounded to zero."""
    logits = torch.tensor([[30.0, 0.0, -1.0]])
    samples = logits, torch.eye(3), torch.ones(3, 3), torch.tensor([0])
    found = plsp_kernels.semantic_cross_entropy(*samples, strength=0.1, impl="torch")
    exact = plsp_kernels.semantic_cross_entropy(
        *(tensor.double() for tensor in samples[:3]), samples[3], strength=0.1, impl="torch"
    )
    assert 1e-14 < float(exact) < 1e-12
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1e4, 1e-4])
def test_extreme_logits_are_exact(kind, scale):
    problem = make_problem(17, 0, kind=kind).map(lambda logits: logits * scale, ("labeled_logits",))
    truth = evaluate(problem, *OPTIONS[1], reduction="none", impl="reference")
    for found, wanted in zip(evaluate(problem, *OPTIONS[1], reduction="none"), truth, strict=True):
        assert_same(found, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_excluded_classes_have_no_probability_and_finite_gradients(kind):
    problem = make_problem(9, 0, kind=kind)
    problem.labels.clamp_(max=4)
    problem.labeled_logits[:, 5:] = -math.inf
    problem.labels[3], problem.labeled_logits[3, 1:] = 0, -math.inf  # no class is left besides the label
    losses, grad_logits, grad_weight = evaluate(problem, *OPTIONS[0], reduction="none")
    assert losses.isfinite().all()
    assert losses[3] == 0
    assert not grad_logits[:, 5:].any()
    assert not grad_logits[3].any()
    assert grad_logits.isfinite().all()
    assert grad_weight.isfinite().all()


def test_excluded_label_has_infinite_loss_and_finite_gradients():
    problem = make_problem(9, 0)
    problem.labeled_logits[3, problem.labels[3]] = -math.inf
    losses, grad_logits, grad_weight = evaluate(problem, *OPTIONS[0], reduction="none")
    assert losses[3] == math.inf
    assert grad_logits.isfinite().all()
    assert grad_weight.isfinite().all()


# --- ignored rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_without_a_counted_row_loss_and_gradients_are_zero(reduction, impl):
    problem = make_problem(3, 0).leaves(("labeled_logits", "weight"))
    for count in (3, 0):
        loss = plsp_kernels.semantic_cross_entropy(
            problem.labeled_logits[:count],
            problem.weight,
            problem.covariance,
            torch.full((count,), IGNORED),
            strength=STRENGTH,
            label_smoothing=0.1,
            reduction=reduction,
            impl=impl,
        )
        gradients = torch.autograd.grad(loss.sum(), (problem.labeled_logits, problem.weight))
        assert not any(value.any() for value in (loss, *gradients))


@pytest.mark.parametrize("ignore_index", [IGNORED, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_ignored_rows_may_hold_anything(kind, ignore_index):
    problem = make_problem(9, 0, kind=kind)
    problem.labels[4] = 2
    expected = evaluate(problem, True, 0.1, 2)
    problem.labels[problem.labels == 2] = ignore_index
    problem.labeled_logits[4] = math.nan
    labels = problem.labels
    logits, weight = problem.labeled_logits.requires_grad_(), problem.weight.requires_grad_()
    loss = plsp_kernels.semantic_cross_entropy(
        logits,
        weight,
        problem.covariance,
        labels,
        strength=STRENGTH,
        class_weight=problem.class_thresholds,
        ignore_index=ignore_index,
        label_smoothing=0.1,
        impl="torch",
    )
    gradients = torch.autograd.grad(loss, (logits, weight), torch.tensor(-3.5 / 4, dtype=torch.float64))
    for found, wanted in zip((loss.detach(), *gradients), expected, strict=True):
        assert_same(found, wanted)


# --- graph, chunks, devices ------------------------------------------------------------------------------------------


def test_covariance_may_change_before_the_backward_of_a_reduced_loss_only():
    problem = make_problem(9, 0).leaves(("labeled_logits", "weight"))
    wanted = problem.gradients(entropy(problem, *OPTIONS[0]), ("weight",))["weight"]
    loss, losses = (entropy(problem, *OPTIONS[0], reduction=reduction) for reduction in ("mean", "none"))
    problem.covariance.mul_(2)
    assert torch.equal(problem.gradients(loss, ("weight",))["weight"], wanted)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivatives_are_refused(reduction):
    problem = make_problem(9, 0).leaves(("labeled_logits", "weight"))
    loss = entropy(problem, *OPTIONS[0], reduction=reduction).sum()
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(loss, problem.weight, create_graph=True)


@pytest.mark.parametrize("kind", KINDS)
def test_repeated_calls_give_the_same_bits(kind):
    problem = make_problem(40, 0, 7, 150, kind=kind, dtype=torch.float32)
    for first, second in zip(*(evaluate(problem, *OPTIONS[1]) for _ in range(2)), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("num_features", [19, 150])  # covariances are gathered up to 128 features
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_one_class_and_one_row_agree(kind, num_features, monkeypatch):
    problem = make_problem(40, 0, 7, num_features, kind=kind)
    whole = evaluate(problem, *OPTIONS[1], reduction="none")
    monkeypatch.setattr(chunks, "_CACHE_BYTES", 1)
    for found, wanted in zip(evaluate(problem, *OPTIONS[1], reduction="none"), whole, strict=True):
        assert_same(found, wanted)


def batch_of(problem: Problem, reduction: str = "mean") -> LabeledBatch:
    samples = problem.labeled_logits, problem.weight, problem.covariance, problem.labels
    return LabeledBatch(*samples, problem.class_thresholds, torch.tensor(STRENGTH), 0.1, 3, reduction)


@pytest.mark.parametrize("kind", KINDS)
def test_other_devices_agree_without_reading_values(kind):
    batch = batch_of(make_problem(9, 0, 41, 5, kind=kind), "none")
    upstream = torch.arange(9) / 4 - 1.0
    elsewhere = LabeledBatch(*(x.as_subclass(Elsewhere) if isinstance(x, Tensor) else x for x in batch))
    found = torch_impl.cross_entropy(elsewhere, upstream, True, True)
    for a, b in zip(found, torch_impl.cross_entropy(batch, upstream, True, True), strict=True):
        assert_same(a.as_subclass(Tensor), b)
    on_device = LabeledBatch(*(x.to("meta") if isinstance(x, Tensor) else x for x in batch))
    for a, b in zip(torch_impl.cross_entropy(on_device, None, True, True), found, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


@pytest.mark.parametrize("value", [-1, 41, 2**40])
def test_labels_out_of_range_are_not_read(value):
    """They are an error on a CPU; on other devices, where they cannot be checked, they make the loss NaN."""
    batch = batch_of(make_problem(9, 0, 41, 5), "none")
    batch.labels[2] = value
    with pytest.raises(IndexError, match=r"^labels must lie in \[0, 41\)"):
        torch_impl.cross_entropy(batch, None, True, True)
    elsewhere = LabeledBatch(*(x.as_subclass(Elsewhere) if isinstance(x, Tensor) else x for x in batch))
    found = torch_impl.cross_entropy(elsewhere, None, True, True)
    assert found.loss.isnan().nonzero()[:, 0].tolist() == [2]
    assert found.grad_logits.isnan().any(1).nonzero()[:, 0].tolist() == [2]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_compiled_loss_equals_eager(reduction):
    compiled = torch.compile(entropy, fullgraph=True, backend="aot_eager")
    problem = make_problem(9, 0).leaves(("labeled_logits", "weight"))
    arguments = [problem, *OPTIONS[1]]
    for strength in (0.1, 0.2):
        options = {"reduction": reduction, "strength": torch.tensor(strength)}
        results = [function(*arguments, **options) for function in (compiled, entropy)]
        assert torch.equal(*results)
        gradients = [problem.gradients(result.sum(), ("labeled_logits", "weight")) for result in results]
        for name, wanted in gradients[1].items():
            assert torch.equal(gradients[0][name], wanted)


def test_gradients_pass_gradcheck():
    problem = make_problem(5, 0, 4, 3).leaves(("labeled_logits", "weight"))
    for kind, reduction in itertools.product(KINDS, ("mean", "none")):
        covariance = problem.covariance if kind == "full" else problem.covariance.diagonal(dim1=1, dim2=2)

        def loss(logits: Tensor, weight: Tensor, covariance=covariance, reduction=reduction) -> Tensor:
            return plsp_kernels.semantic_cross_entropy(
                *(logits, weight, covariance.contiguous(), problem.labels),
                strength=0.7,
                class_weight=problem.class_thresholds,
                label_smoothing=0.1,
                reduction=reduction,
                impl="torch",
            )

        assert torch.autograd.gradcheck(loss, (problem.labeled_logits, problem.weight))
