"""Print the table of docs/accuracy.md: measured errors of every implementation, function and dtype.

    python tests/kernels/accuracy_table.py

Each entry is the largest error against the float64 reference, over the shapes of `CASES`, both kinds of covariance and
two strengths; inputs are rounded to the dtype first, so that only the computation is measured. "abs" is the largest
absolute error, "rel" the largest error of a result divided by its own largest element.
"""

import os
from collections import defaultdict

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

from torch import Tensor

import plsp_kernels
from cases import KINDS, Problem, clear_threshold, make_problem, maximum

CASES = [(3, 17, 7, 19), (17, 17, 2, 130), (17, 3, 41, 84)]
NATIVE_CASES = CASES[:2]  # the third has more classes than samples
INTERPRETER_CASES = CASES[:1]  # interpreted kernels are a thousand times slower
STRENGTHS = (0.01, 1.0)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def results(problem: Problem, impl: str, strength: float, threshold: float) -> dict[str, list[Tensor]]:
    """Results and gradients of every public function that has this implementation."""
    problem = problem.leaves()
    samples = problem.weight, problem.covariance, problem.pseudo_labels
    options = {"strength": strength, "impl": impl}
    loss = problem.loss(thresholds=threshold, pseudo_labels=problem.pseudo_labels, **options)
    entropy = plsp_kernels.semantic_cross_entropy(problem.weak_logits, *samples, **options)
    losses = {
        "semantic_upper_bound_loss": [*loss[:4]],
        "gradients of the total loss": list(problem.gradients(loss.total).values()),
        "semantic_cross_entropy": [entropy],
        "gradients of the cross-entropy": list(problem.gradients(entropy, ["weak_logits", "weight"]).values()),
    }
    if impl == "native":
        return losses
    log_probability = plsp_kernels.semantic_log_softmax(problem.weak_logits, *samples, **options)
    form = plsp_kernels.pairwise_quadratic_form(*samples, impl=impl)
    mean = log_probability.sum(dtype=torch.promote_types(log_probability.dtype, torch.float32)) / len(log_probability)
    return losses | {
        "semantic_log_softmax": [log_probability],
        "gradients of the mean log-softmax": list(problem.gradients(mean, ["weak_logits", "weight"]).values()),
        "probit_probabilities": [plsp_kernels.probit_probabilities(problem.weak_logits, *samples, **options)],
        "pairwise_quadratic_form": [form],
    }


def measure(impl: str, dtype: torch.dtype, shapes: list[tuple[int, ...]]) -> dict[str, tuple[float, float]]:
    worst: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    if impl == "native" and dtype == torch.float64:
        return {}
    for shape in shapes:
        for kind in KINDS:
            for strength in STRENGTHS:
                problem = make_problem(*shape, dtype=dtype, kind=kind)
                double = problem.to(torch.float64)
                settings = {"pseudo_labels": problem.pseudo_labels, "strength": strength}
                threshold = clear_threshold(double.loss(impl="reference", **settings).confidence)
                truth = results(double, "reference", strength, threshold)
                for name, found in results(problem, impl, strength, threshold).items():
                    for tensor, true in zip(found, truth[name], strict=True):
                        error, size = maximum(tensor.detach().double() - true.detach()), maximum(true.detach())
                        absolute, relative = worst[name]
                        worst[name] = max(absolute, error), max(relative, error / size if size else 0.0)
    return dict(worst)


def implementations() -> dict[str, list[tuple[int, ...]]]:
    found = {"reference": CASES, "torch": CASES, "native": NATIVE_CASES}
    try:
        import plsp_kernels.triton_impl  # noqa: F401
    except ImportError:
        return found
    return found | {"triton": CASES if torch.cuda.is_available() else INTERPRETER_CASES}


def main() -> None:
    columns = [(str(dtype).removeprefix("torch."), part) for dtype in DTYPES for part in ("abs", "rel")]
    print("| function | implementation | " + " | ".join(f"{dtype} {part}" for dtype, part in columns) + " |")
    print("|---|---|" + "---|" * len(columns))
    table = {impl: [measure(impl, dtype, shapes) for dtype in DTYPES] for impl, shapes in implementations().items()}
    for name in next(iter(table.values()))[0]:
        for impl, measured in table.items():
            entries = [_entry(value) for errors in measured for value in errors.get(name, (None, None))]
            if set(entries) != {"–"}:
                print(f"| {name} | {impl} | " + " | ".join(entries) + " |")


def _entry(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1e}" if value else "0"


if __name__ == "__main__":
    main()
