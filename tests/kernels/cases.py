"""Random problems for the kernel tests, and the two rules for comparing results.

Problems resemble training: logits are `features @ weight.T + bias` with features biased towards the weight of their
class, strong views are noisier than weak ones, and covariances are sample covariances: positive semi-definite and, with
more features than samples, singular.
"""

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

import plsp_kernels
from plsp_kernels import SemanticLoss, native
from plsp_kernels.step import Step

STRENGTH = 0.3
KINDS = ("full", "diagonal")
PATTERNS = ("flipped", "single", "all_but_one", "full")
TERMS = ("total", "supervised", "consistency", "complementary")
# Implementations of a small float32 step: the operators of torch_impl, or C compiled for some instruction set.
FORMS = ("operators", *native.VERSIONS)
DIFFERENTIABLE = ("labeled_logits", "weak_logits", "strong_logits", "weight")

# (Bl, Bu, l, d): sizes around and between powers of two, the tile sizes. Every l in 2, 7, 41, 130 occurs with two d in
# 1, 19, 84, 130 and with batches smaller and larger than l, which assign slots differently.
SHAPES = [
    (1, 3, 2, 1),
    (17, 17, 2, 130),
    (3, 17, 7, 19),
    (17, 1, 7, 84),
    (17, 3, 41, 84),
    (1, 17, 41, 1),
    (3, 1, 130, 19),
    (1, 1, 130, 130),
]


@dataclasses.dataclass(frozen=True)
class Problem:
    """The tensors of one training step."""

    labeled_logits: Tensor  # (Bl, l)
    weak_logits: Tensor  # (Bu, l)
    strong_logits: Tensor  # (Bu, l)
    weight: Tensor  # (l, d)
    covariance: Tensor  # (l, d, d) or (l, d)
    labels: Tensor  # (Bl,)
    candidates: Tensor  # (Bu, l)
    pseudo_labels: Tensor  # (Bu,)
    labeled_candidates: Tensor  # (Bl, l)
    class_thresholds: Tensor  # (l,)

    def map(self, function: Callable[[Tensor], Tensor], names: Iterable[str] | None = None) -> "Problem":
        """Apply the function to the named tensors, by default to all floating-point ones."""
        if names is None:
            names = [f.name for f in dataclasses.fields(self) if getattr(self, f.name).is_floating_point()]
        return dataclasses.replace(self, **{name: function(getattr(self, name)) for name in names})

    def to(self, dtype: torch.dtype) -> "Problem":
        return self.map(lambda tensor: tensor.to(dtype))

    def leaves(self, names: Iterable[str] = DIFFERENTIABLE) -> "Problem":
        """A copy in which only the named tensors require gradients."""
        copy = self.map(lambda tensor: tensor.detach().clone())
        return copy.map(lambda tensor: tensor.requires_grad_(), names)

    def loss(
        self, *, impl: str, strength: float = STRENGTH, thresholds: float | Tensor = 0.5, **options
    ) -> SemanticLoss:
        return plsp_kernels.semantic_upper_bound_loss(
            self.labeled_logits,
            self.weak_logits,
            self.strong_logits,
            self.weight,
            self.covariance,
            self.labels,
            self.candidates,
            strength=strength,
            thresholds=thresholds,
            impl=impl,
            **options,
        )

    def step(self, with_candidates: bool = False) -> Step:
        """The step with the pseudo-labels given and, on request, the candidate sets of the labelled batch."""
        return Step(
            self.labeled_logits,
            self.weak_logits,
            self.strong_logits,
            self.weight,
            self.covariance,
            self.labels,
            self.candidates,
            self.pseudo_labels,
            self.labeled_candidates if with_candidates else None,
            self.class_thresholds,
            *(torch.tensor(number, dtype=torch.float64) for number in (STRENGTH, 0.7)),
            1.2,
            True,
        )

    def gradients(self, output: Tensor, names: Iterable[str] = DIFFERENTIABLE) -> dict[str, Tensor]:
        """Gradients of a scalar; zero for tensors it does not depend on."""
        names = list(names)
        tensors = [getattr(self, name) for name in names]
        if not output.requires_grad:
            return {name: torch.zeros_like(tensor) for name, tensor in zip(names, tensors, strict=True)}
        found = torch.autograd.grad(output, tensors, allow_unused=True, retain_graph=True)
        return {
            name: torch.zeros_like(tensor) if grad is None else grad
            for name, tensor, grad in zip(names, tensors, found, strict=True)
        }


def make_problem(
    *shape: int, dtype: torch.dtype = torch.float64, kind: str = "full", pattern: str = "flipped", seed: int = 0
) -> Problem:
    """A problem of shape (Bl, Bu, l, d); sizes that are not given are those of (3, 5, 7, 19)."""
    num_labeled, num_unlabeled, num_classes, num_features = (*shape, *(3, 5, 7, 19)[len(shape) :])
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    def pick(count: int) -> Tensor:
        return torch.randint(num_classes, (count,), generator=generator)

    weight = normal(num_classes, num_features) / num_features**0.5
    bias = 0.1 * normal(num_classes)
    labels, truth = pick(num_labeled), pick(num_unlabeled)

    def logits(classes: Tensor, noise: float) -> Tensor:
        lean = 4 * weight[classes] / weight[classes].square().sum(1, keepdim=True).clamp(min=0.25)
        return (lean + noise * normal(classes.shape[0], num_features)) @ weight.T + bias

    labeled_logits, weak_logits, strong_logits = logits(labels, 0.5), logits(truth, 0.5), logits(truth, 1.5)
    samples = normal(num_classes, 20, num_features)  # fewer samples than features in most shapes: Σ is singular
    covariance = samples.mT @ samples / 20 if kind == "full" else samples.square().mean(1)
    candidates = _candidates(truth, num_classes, pattern, generator)
    return Problem(
        labeled_logits,
        weak_logits,
        strong_logits,
        weight,
        covariance,
        labels,
        candidates,
        _members(candidates, generator),
        _candidates(labels, num_classes, pattern, generator),
        torch.rand(num_classes, generator=generator, dtype=torch.float64),
    ).to(dtype)


def _candidates(truth: Tensor, num_classes: int, pattern: str, generator: torch.Generator) -> Tensor:
    """Candidate sets around the true labels: (N, l)."""
    own = torch.nn.functional.one_hot(truth, num_classes).bool()
    if pattern == "single":
        return own
    if pattern == "full":
        return torch.ones_like(own)
    if pattern == "all_but_one":
        return ~own.roll(1, dims=1)
    return own | (torch.rand(own.shape, generator=generator) < 0.3)


def _members(candidates: Tensor, generator: torch.Generator) -> Tensor:
    """One random candidate per row: (N,)."""
    return (torch.rand(candidates.shape, generator=generator) * candidates).argmax(1)


def clear_threshold(confidence: Tensor) -> float:
    """A threshold in the widest gap between confidences, so that rounding cannot move an instance across it."""
    edges = torch.cat([confidence.new_tensor([0.0]), confidence.double().sort().values, confidence.new_tensor([1.0])])
    gaps = edges.diff()
    widest = int(gaps.argmax())
    return float(edges[widest] + gaps[widest] / 2)


def maximum(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def assert_same(found: Tensor, truth: Tensor, tolerance: float = 1e-12, name: str = "result") -> None:
    """Equal up to `tolerance` times the largest element (at least one); by default float64 rounding."""
    assert found.shape == truth.shape, f"{name}: shape {tuple(found.shape)}, wanted {tuple(truth.shape)}"
    assert found.isfinite().all(), f"{name} is not finite"
    error, allowed = maximum(found.double() - truth.double()), tolerance * max(1.0, maximum(truth))
    assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def assert_error_rule(found: Tensor, rival: Tensor, truth: Tensor, slack: float, name: str = "result") -> None:
    """At least as accurate against float64 truth as the reference in the same dtype, up to `slack`.

    The slack is in units of float32 epsilon at the size of the result: half-precision inputs are computed in float32
    too, and rounding the result to the input dtype affects the reference equally.
    """
    assert found.dtype == rival.dtype
    assert found.shape == truth.shape
    assert found.isfinite().all(), f"{name} is not finite"
    error, rival_error = maximum(found.double() - truth), maximum(rival.double() - truth)
    allowed = rival_error + slack * torch.finfo(torch.float32).eps * max(1.0, maximum(truth))
    assert error <= allowed, f"{name}: error {error:.3g}, reference {rival_error:.3g}, allowed {allowed:.3g}"


def torch_impl_module(name: str):
    """The module plsp_kernels.torch_impl.<name>; the package attribute of that name is a function."""
    return importlib.import_module(f"plsp_kernels.torch_impl.{name}")


@contextlib.contextmanager
def closed_form(form: str) -> Iterator[None]:
    """Compute the loss with this one of FORMS."""
    versions = native.VERSIONS
    native.VERSIONS = versions[: FORMS.index(form)]
    try:
        yield
    finally:
        native.VERSIONS = versions


class Elsewhere(torch.Tensor):
    """A CPU tensor that claims to be on another device, to test branches that must not read values."""

    @property
    def device(self) -> torch.device:
        return torch.device("meta")
