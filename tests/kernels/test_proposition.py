"""Proposition 1 by sampling: the bound holds, and probit probabilities approximate the expectation.

Features are drawn from N(a, λ Σ_y), as equation (8) transforms them, and pass through the same classifier. 20,000 draws
in float64; the standard error of a sampled probability is at most 0.0036.
"""

import math

import pytest
import torch

from plsp_kernels import probit_probabilities, semantic_cross_entropy, semantic_log_softmax

NUM_DRAWS = 20_000
NUM_SAMPLES = 12


def sample(num_classes, num_features, strength, seed=0):
    """A random problem, and the log-softmax of every draw: (N, draws, l)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    weight, bias = normal(num_classes, num_features), 0.3 * normal(num_classes)
    root = normal(num_classes, num_features, num_features) / num_features**0.5
    covariance = root @ root.mT
    features = normal(NUM_SAMPLES, num_features)
    classes = torch.randint(num_classes, (NUM_SAMPLES,), generator=generator)
    draws = normal(NUM_SAMPLES, NUM_DRAWS, num_features) @ (strength**0.5 * root[classes]).mT + features[:, None]
    log_probability = (draws @ weight.T + bias).log_softmax(-1)
    return (features @ weight.T + bias, weight, covariance, classes), log_probability


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize(("num_classes", "num_features", "strength"), [(2, 3, 1.0), (5, 4, 0.5), (10, 6, 1.0)])
def test_bound_is_not_below_the_sampled_expectation(num_classes, num_features, strength, impl):
    problem, log_probability = sample(num_classes, num_features, strength)
    expectation = -log_probability.mean(1)
    standard_error = log_probability.std(1) / NUM_DRAWS**0.5
    bound = -semantic_log_softmax(*problem, strength=strength, impl=impl)
    assert (bound >= expectation - 5 * standard_error).all()
    # guards against the plain loss, which by Jensen's inequality lies below the expectation
    plain = -semantic_log_softmax(*problem, strength=0.0, impl=impl)
    assert (plain < expectation - 5 * standard_error).any()


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_bound_is_tight_for_small_strengths(impl):
    """E[-log softmax] grows by (λ/2) tr(H Σ) to first order, H being the Hessian; the bound by at most (λ/2) Σ p Q.

    Both equal the plain loss at λ = 0, so the gap is O(λ): a hundredth of the strength, about a hundredth of the gap.
    """
    gaps = []
    for strength in (1e-1, 1e-3):
        problem, _ = sample(5, 4, strength)
        plain = -semantic_log_softmax(*problem, strength=0.0, impl=impl)
        gaps.append((-semantic_log_softmax(*problem, strength=strength, impl=impl) - plain).max())
    assert gaps[1] > 0
    assert 50 < gaps[0] / gaps[1] < 150


@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_cross_entropy_bounds_the_sampled_cross_entropy(impl, label_smoothing):
    (logits, weight, covariance, labels), log_probability = sample(5, 4, 0.5)
    targets = (1 - label_smoothing) * torch.nn.functional.one_hot(labels, 5).double() + label_smoothing / 5
    losses = -(targets[:, None, :] * log_probability).sum(2)
    options = {"label_smoothing": label_smoothing, "reduction": "none", "impl": impl}
    bound = semantic_cross_entropy(logits, weight, covariance, labels, strength=0.5, **options)
    assert (bound >= losses.mean(1) - 5 * losses.std(1) / NUM_DRAWS**0.5).all()


MATCHED, PAPER = math.sqrt(math.pi / 8), math.pi**2 / 8


# Tolerances are a fifth above the errors measured for the matched scale.
@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize(
    ("num_classes", "num_features", "strength", "allowed"), [(2, 3, 1.0, 0.014), (4, 3, 0.1, 0.038), (10, 6, 0.1, 0.1)]
)
def test_probit_probabilities_approach_the_sampled_softmax(num_classes, num_features, strength, allowed, impl):
    """Largest error against the sampled mean of the softmax:

    | l, d, λ | β = sqrt(π/8) | β = π²/8, the paper's |
    |---|---|---|
    | 2, 3, 1.0 | 0.0114 | 0.0967 |
    | 4, 3, 0.1 | 0.0313 | 0.2139 |
    | 10, 6, 0.1 | 0.0822 | 0.2243 |
    """
    problem, log_probability = sample(num_classes, num_features, strength)
    expectation = log_probability.exp().mean(1)
    error = {
        beta: float((probit_probabilities(*problem, strength=strength, beta=beta, impl=impl) - expectation).abs().max())
        for beta in (MATCHED, PAPER)
    }
    assert error[MATCHED] < error[PAPER]
    assert error[MATCHED] < allowed


@pytest.mark.parametrize("impl", ["torch", "reference"])
def test_probabilities_of_two_classes_are_exact_for_a_probit_link(impl):
    """E[Φ(β m)] for m ~ N(μ, s²) is Φ(β μ / sqrt(1 + β² s²)) exactly, s² = λ Q: no error but that of sampling."""
    (logits, weight, covariance, classes), _ = sample(2, 3, 1.0)
    difference = weight[0] - weight[1]
    deviation = (difference @ covariance[classes] @ difference).sqrt()
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(NUM_DRAWS, generator=generator, dtype=torch.float64)
    margin = (logits[:, 0] - logits[:, 1])[:, None] + deviation[:, None] * noise
    for beta in (MATCHED, PAPER):
        values = torch.special.ndtr(beta * margin)
        found = probit_probabilities(logits, weight, covariance, classes, strength=1.0, beta=beta, impl=impl)[:, 0]
        assert ((found - values.mean(1)).abs() <= 5 * values.std(1) / NUM_DRAWS**0.5).all()
