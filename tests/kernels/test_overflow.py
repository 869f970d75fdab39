"""A batch that overflows in half precision, in a training loop with a gradient scaler."""

import pytest
import torch

from cases import KINDS
from plsp_kernels import SemanticCovariance, SemanticUpperBoundLoss

CLASSES, FEATURES, LABELED, UNLABELED = 3, 6, 5, 8


@pytest.mark.parametrize("impl", ["auto", "torch", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_recovers_from_one_overflowing_batch(kind: str, impl: str) -> None:
    torch.manual_seed(0)
    backbone, classifier = torch.nn.Linear(4, FEATURES), torch.nn.Linear(FEATURES, CLASSES)
    parameters = [*backbone.parameters(), *classifier.parameters()]
    optimizer, scaler = torch.optim.SGD(parameters, lr=0.05), torch.amp.GradScaler("cpu", init_scale=2.0**8)
    criterion = SemanticUpperBoundLoss(40, CLASSES, FEATURES, covariance=kind, impl=impl)
    candidates = torch.tensor([[1, 1, 0], [0, 1, 1]]).bool().repeat(UNLABELED // 2, 1)
    finite = []
    for number in range(6):
        inputs = torch.randn(LABELED + 2 * UNLABELED, 4) * (1e6 if number == 2 else 1.0)
        before = classifier.weight.detach().clone()
        with torch.autocast("cpu", torch.float16):
            features = backbone(inputs)
            labeled, weak, strong = classifier(features).split([LABELED, UNLABELED, UNLABELED])
            loss = criterion(
                labeled,
                weak,
                strong,
                classifier.weight,
                torch.arange(LABELED) % CLASSES,
                candidates,
                labeled_features=features[:LABELED],
                index=torch.randperm(40)[:UNLABELED],
                strength=0.5,
            )
        optimizer.zero_grad()
        scaler.scale(loss.total).backward()
        scaler.step(optimizer)
        scaler.update()
        finite.append(bool(loss.total.isfinite()))
        assert torch.equal(classifier.weight, before) == (number == 2)
    assert finite == [True, True, False, True, True, True]
    assert all(parameter.isfinite().all() for parameter in parameters)
    assert criterion.covariance.skipped.sum() == LABELED
    assert criterion.covariance.count.sum() == 5 * LABELED
    assert all(buffer.isfinite().all() for buffer in criterion.buffers())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [2, 9], ids=["fewer samples than classes", "more samples than classes"])
def test_samples_left_out_do_not_affect_the_others(kind: str, count: int) -> None:
    """On a CPU, in C and in ATen operators; the kernels for GPUs have their own test."""
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.randn(count, FEATURES, generator=generator), torch.arange(count) % CLASSES
    broken = torch.cat([features, torch.full((3, FEATURES), 1.0)])
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        broken[count + row, row] = value
    more = torch.cat([labels, torch.tensor([0, 1, 1])])
    for impl in ("auto", "torch"):
        ours, theirs = SemanticCovariance(CLASSES, FEATURES, kind), SemanticCovariance(CLASSES, FEATURES, kind)
        ours._take_in(broken, more, impl)
        theirs._take_in(features, labels, impl)
        assert ours.skipped.tolist() == [1, 2, 0]
        torch.testing.assert_close(ours.covariance, theirs.covariance, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-6, atol=1e-6)
        assert torch.equal(ours.count, theirs.count)
        ours._take_in(torch.full((2, FEATURES), torch.nan), torch.tensor([2, 2]), impl)
        assert ours.skipped.tolist() == [1, 2, 2]
        assert all(buffer.isfinite().all() for buffer in ours.buffers())


def test_features_beyond_the_range_of_the_statistics_are_left_out() -> None:
    statistics = SemanticCovariance(2, 1)
    statistics.update(torch.tensor([[1e300], [1.0]], dtype=torch.float64), torch.tensor([0, 1]))
    assert (statistics.count.tolist(), statistics.skipped.tolist()) == ([0, 1], [1, 0])
