"""The loss and the covariance update against what they replace, all in one run.

    python -m benchmarks            # some minutes: the eager reference takes most of them
    python -m benchmarks --quick    # without the reference at the cifar100 shape

Times are medians of interleaved repetitions, so that a ratio compares what the machine did in the same minute. A
speed-up is reported only for an implementation that agrees with the reference in this run.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.memory import peak_extra_bytes
from plsp_kernels import SemanticCovariance, SemanticLoss, reference, semantic_upper_bound_loss


class Shape(NamedTuple):
    name: str
    labeled: int
    unlabeled: int
    num_classes: int
    num_features: int


SHAPES = [Shape("fmnist", 64, 256, 10, 84), Shape("cifar100", 16, 64, 100, 512)]


class Problem:
    """Inputs of one step; `distinct` gives every sample a class of its own as far as there are classes."""

    def __init__(self, shape: Shape, distinct: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        num_classes, num_features = shape.num_classes, shape.num_features
        self.weight = (torch.randn(num_classes, num_features, generator=generator) / num_features**0.5).requires_grad_()
        factor = torch.randn(num_classes, num_features, num_features, generator=generator) / num_features**0.5
        self.covariance = factor @ factor.mT
        self.logits = [
            (3 * torch.randn(count, num_classes, generator=generator)).requires_grad_()
            for count in (shape.labeled, shape.unlabeled, shape.unlabeled)
        ]
        count = shape.labeled + shape.unlabeled
        classes = torch.randperm(count, generator=generator) % num_classes if distinct else None
        self.labels = (
            torch.randint(num_classes, (shape.labeled,), generator=generator)
            if classes is None
            else classes[: shape.labeled]
        )
        self.pseudo_labels = None if classes is None else classes[shape.labeled :]
        self.candidates = torch.rand(shape.unlabeled, num_classes, generator=generator) < 0.3
        own = torch.randint(num_classes, (shape.unlabeled, 1), generator=generator)
        self.candidates.scatter_(1, own, True)

    def loss(self, impl: str) -> SemanticLoss:
        labeled, weak, strong = self.logits
        return semantic_upper_bound_loss(
            labeled,
            weak,
            strong,
            self.weight,
            self.covariance,
            self.labels,
            self.candidates,
            strength=0.01,
            thresholds=0.5,
            pseudo_labels=self.pseudo_labels,
            impl=impl,
        )

    def step(self, impl: str) -> list[Tensor]:
        """Forward and backward: the loss and its gradients."""
        total = self.loss(impl).total
        return [total.detach(), *torch.autograd.grad(total, [*self.logits, self.weight])]

    def floor(self) -> Tensor:
        """One bare batched W Σ, work nobody can avoid."""
        num_classes, num_features = self.weight.shape
        return torch.bmm(self.weight.detach().expand(num_classes, num_classes, num_features), self.covariance)


def count_operators(call: Callable[[], object]) -> int:
    """ATen calls made by the call, not counting those that ATen makes itself."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    return sum(
        event.name.startswith("aten::")
        and not (event.cpu_parent is not None and event.cpu_parent.name.startswith("aten::"))
        for event in profiler.events() or []
    )


def interleaved(subjects: dict[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
    """Median seconds of each subject. They take turns, several calls each after one to warm up: a subject that fills
    gigabytes must not bill the next one for cold caches and returned pages."""
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(3 if repetitions > 1 else 1):
        for name, subject in subjects.items():
            for call in range(max(1, repetitions // 3) + 1):
                start = time.perf_counter()
                subject()
                if call or repetitions == 1:
                    times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def largest_error(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Largest difference of any result relative to the largest entry of its tensor."""
    return max(
        ((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item() for a, b in zip(found, wanted, strict=True)
    )


def report_loss(shape: Shape, with_reference: bool) -> None:
    problem = Problem(shape)
    small = shape.num_classes < 50
    times = interleaved(
        {"floor": problem.floor, "loss": lambda: problem.step("torch")}, repetitions=200 if small else 15
    )
    print(f"\n{shape.name}: Bl {shape.labeled}, Bu {shape.unlabeled}, l {shape.num_classes}, d {shape.num_features}")
    print(f"  bare bmm(W, Σ)          {1e3 * times['floor']:10.2f} ms")
    line = f"  closed form, fwd + bwd  {1e3 * times['loss']:10.2f} ms"
    print(line + ("" if small else f"   {times['loss'] / times['floor']:.2f} x the bare bmm"))
    if not small:
        worst = Problem(shape, distinct=True)
        worst_times = interleaved({"floor": worst.floor, "loss": lambda: worst.step("torch")}, repetitions=15)
        ratio = worst_times["loss"] / worst_times["floor"]
        print(f"    every class distinct  {1e3 * worst_times['loss']:10.2f} ms   {ratio:.2f} x the bare bmm")
    print(f"  extra peak memory       {peak_extra_bytes(lambda: problem.step('torch')) / 2**20:10.1f} MiB")
    print(f"  ATen calls              {count_operators(lambda: problem.step('torch')):10d}")
    if with_reference:
        error = largest_error(problem.step("torch"), problem.step("reference"))
        if not error < 1e-3:
            raise SystemExit(f"the closed form disagrees with the reference by {error:.1e}: no speed-up to report")
        eager = interleaved({"reference": lambda: problem.step("reference")}, repetitions=9 if small else 1)
        memory = peak_extra_bytes(lambda: problem.step("reference")) / 2**20
        speedup = eager["reference"] / times["loss"]
        print(f"  eager reference         {1e3 * eager['reference']:10.2f} ms   {memory:.0f} MiB extra")
        print(f"  speed-up                {speedup:10.1f} x   largest relative difference {error:.1e}")


def report_covariance(shape: Shape) -> None:
    features = torch.randn(shape.labeled, shape.num_features)
    labels = torch.randint(shape.num_classes, (shape.labeled,))
    state = SemanticCovariance(shape.num_classes, shape.num_features)
    every = (state.covariance.clone(), state.mean.clone(), state.count.clone())
    times = interleaved(
        {
            "all classes": lambda: reference.update_covariance(*every, features, labels),
            "batch": lambda: state.update(features, labels),
        },
        repetitions=10,
    )
    print(f"\n{shape.name}: covariance update of {shape.labeled} samples")
    print(f"  all classes             {1e3 * times['all classes']:10.2f} ms")
    speedup = times["all classes"] / times["batch"]
    print(f"  classes of the batch    {1e3 * times['batch']:10.2f} ms   {speedup:.0f} x faster")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="leave out the eager reference at the cifar100 shape")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32")
    for shape in SHAPES:
        report_loss(shape, with_reference=not (arguments.quick and shape.num_classes >= 50))
        report_covariance(shape)


if __name__ == "__main__":
    main()
