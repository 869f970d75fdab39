"""The pieces of PiCO against loops that say the same."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plsp_train.methods.contrastive import KeyQueue, own_key_contrast, same_label_contrast, update_prototypes
from plsp_train.methods.pico import PiCO
from small_runs import digits_task


def _unit_vectors(count: int, seed: int = 0) -> Tensor:
    vectors = torch.randn(count, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return F.normalize(vectors, dim=1)


def _queue(size: int, batch: int) -> KeyQueue:
    assert size % batch == 0
    return KeyQueue(size, 6, torch.device("cpu"), torch.Generator().manual_seed(0))


def test_prototype_update_equals_one_sample_at_a_time() -> None:
    old, embeddings = _unit_vectors(5), _unit_vectors(40, seed=1)
    labels = torch.randint(4, (40,), generator=torch.Generator().manual_seed(2))  # class 4 has no sample
    expected = old.clone()
    for embedding, label in zip(embeddings, labels.tolist(), strict=True):
        expected[label] = 0.99 * expected[label] + 0.01 * embedding
    expected = F.normalize(expected, dim=1)
    torch.testing.assert_close(update_prototypes(old, embeddings, labels), expected, rtol=1e-12, atol=1e-12)


def test_same_label_contrast_is_the_mean_over_positives() -> None:
    pool = _unit_vectors(12)
    labels = torch.tensor([0, 1, 1, 2, 0, 1, 1, 2, 0, -1, 1, 3])  # four queries, their keys, four of the queue
    total = 0.0
    for i in range(4):
        others = [j for j in range(12) if j != i]
        share = {j: math.exp(pool[i].dot(pool[j]).item() / 0.07) for j in others}
        positives = [j for j in others if labels[j] == labels[i]]
        total -= sum(math.log(share[j] / sum(share.values())) for j in positives) / len(positives)
    assert same_label_contrast(pool, labels, 4, num_classes=4).item() == pytest.approx(total / 4, rel=1e-12)


def test_same_label_contrast_has_the_gradient_of_its_definition() -> None:
    labels = torch.tensor([0, 1, 1, 2, 0, 1, 1, 2, 0, -1, 1, 3])
    queries, rest = _unit_vectors(12).split([4, 8])
    queries.requires_grad_()
    pool = torch.cat([queries, rest])
    similarity = (queries @ pool.T / 0.07).masked_fill(torch.eye(4, 12, dtype=torch.bool), -math.inf)
    positive = (labels[:4, None] == labels) & ~torch.eye(4, 12, dtype=torch.bool)
    log_share = similarity.log_softmax(1).masked_fill(~positive, 0)
    expected = torch.autograd.grad(-(log_share.sum(1) / positive.sum(1)).mean(), queries)
    found = torch.autograd.grad(same_label_contrast(pool, labels, 4, num_classes=4), queries)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_same_label_contrast_of_a_single_query_has_a_finite_gradient(dtype: torch.dtype) -> None:
    pool = _unit_vectors(4).to(dtype).requires_grad_()
    same_label_contrast(pool, torch.tensor([1, 1, 0, -1]), 1, num_classes=2).backward()
    assert pool.grad.isfinite().all()
    assert pool.grad[0].abs().max() > 0


def test_own_key_contrast_uses_only_the_queue_as_negatives() -> None:
    pool = _unit_vectors(12)
    total = 0.0
    for i in range(4):
        own, *others = (math.exp(pool[i].dot(pool[j]).item() / 0.07) for j in (4 + i, *range(8, 12)))
        total -= math.log(own / (own + sum(others)))
    assert own_key_contrast(pool, 4).item() == pytest.approx(total / 4, rel=1e-12)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_contrast_has_finite_gradients_at_extreme_similarities(sign: float) -> None:
    pool = (1e3 * torch.ones(6, 3) * torch.tensor([1, sign, 1, sign, 1, sign])[:, None]).requires_grad_()
    loss = same_label_contrast(pool, torch.tensor([0, 1, 0, 1, 1, 0]), 2, num_classes=2) + own_key_contrast(pool, 2)
    loss.backward()
    assert math.isfinite(loss.item())
    assert torch.isfinite(pool.grad).all()


def test_the_queue_replaces_its_oldest_keys() -> None:
    queue = _queue(6, 2)
    assert (queue.labels == -1).all()
    for turn in range(4):
        queue.push(torch.full((2, 6), float(turn)), torch.tensor([turn, turn]))
    assert queue.labels.tolist() == [3, 3, 1, 1, 2, 2]
    assert queue.keys[:, 0].tolist() == [3, 3, 1, 1, 2, 2]


@pytest.mark.parametrize(("batch", "size"), [(64, 1408), (1000, 1000), (10**6, 1437)])
def test_the_queue_is_a_multiple_of_the_batch_and_fits_the_training_set(batch: int, size: int) -> None:
    assert len(PiCO(digits_task(method="pico", batch_size=batch)).queue.labels) == size


def _method_after_steps(steps: int, epoch: int = 1) -> PiCO:
    method = PiCO(digits_task(method="pico"))
    method.task.model.train()
    method.start_epoch("train", epoch)
    for _ in range(steps):
        method.step("train", epoch).loss.backward()
    return method


def test_the_key_encoder_follows_the_query_encoder() -> None:
    method = _method_after_steps(1)
    query, key = method.encoder, method.key_encoder.module
    before = {name: value.clone() for name, value in key.named_parameters()}
    with torch.no_grad():
        for parameter in query.parameters():
            parameter.add_(1.0)
    method.step("train", 1)
    for name, value in query.named_parameters():
        expected = 0.999 * before[name] + 0.001 * value
        torch.testing.assert_close(dict(key.named_parameters())[name], expected)
    assert all(parameter.grad is None for parameter in key.parameters())


def test_the_head_is_trained_by_the_engine_and_by_the_loss() -> None:
    method = _method_after_steps(1)
    head = list(method.parameters())
    assert [tuple(parameter.shape) for parameter in head] == [(64, 64), (64,), (128, 64), (128,)]
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in head)


def test_prototypes_update_confidences_from_the_second_epoch() -> None:
    method = _method_after_steps(2)
    uniform = method.confidences.clone()
    assert torch.equal(uniform, PiCO(digits_task(method="pico")).confidences)
    candidates, old = method.task.candidates[:], method.prototypes.clone()
    queries: list[Tensor] = []
    method.encoder.register_forward_hook(lambda *call: queries.append(call[2][1].detach()))
    method.start_epoch("train", 2)
    method.step("train", 2)
    index = method.sampler._order[: method.sampler.batch_size]
    nearest = (queries[0] @ old.T).masked_fill(~candidates[index], -math.inf).argmax(1)
    momentum = method.confidence_momentum(2)
    expected = momentum * uniform[index] + (1 - momentum) * F.one_hot(nearest, 10)
    torch.testing.assert_close(method.confidences[index], expected)
    assert (method.confidences[~candidates] == 0).all()


def test_confidence_momentum_decreases_linearly() -> None:
    method = PiCO(digits_task(method="pico", epochs=100))
    assert [method.confidence_momentum(epoch) for epoch in (2, 52)] == pytest.approx([0.95, 0.875])
    assert method.confidence_momentum(100) == pytest.approx(0.803)
