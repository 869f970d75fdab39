"""Stateful modules: class statistics, curriculum thresholds, and the loss that combines them."""

import copy
import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import plsp_kernels
from cases import KINDS, STRENGTH, TERMS, Elsewhere, assert_same, closed_form, make_problem, torch_impl_module
from plsp_kernels import (
    CurriculumThreshold,
    SemanticCovariance,
    SemanticCrossEntropyLoss,
    SemanticUpperBoundLoss,
    reference,
)
from plsp_kernels.curriculum import CurriculumBatch
from plsp_kernels.torch_impl import curriculum_update

EPS = torch.finfo(torch.float32).eps


def normal(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def integers(limit, count, seed=0):
    return torch.randint(limit, (count,), generator=torch.Generator().manual_seed(seed))


def assert_equal_states(a, b):
    for (name, found), expected in zip(a.named_buffers(), b.buffers(), strict=True):
        assert torch.equal(found, expected), name


class Device(SemanticCovariance):
    """Uses the code path of other devices: one batched product instead of one GEMM per class."""

    @torch.no_grad()
    def update(self, features, labels):
        statistics = self.covariance.as_subclass(Elsewhere), self.mean, self.count, self.skipped
        torch_impl_module("covariance_update").covariance_update(*statistics, features, labels)


# float32 statistics of standard normal data: a few roundings per update, whose errors mostly average out
TOLERANCE = 16 * EPS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("module", [SemanticCovariance, Device], ids=["CPU", "device"])
@pytest.mark.usefixtures("form")
class TestSemanticCovariance:
    def filled(self, module, kind, num_batches=4, size=30, num_classes=5, num_features=4):
        """Statistics of some batches, and the batches. The last class has no samples."""
        statistics = module(num_classes, num_features, kind)
        batches = [
            (normal(size, num_features, seed=i) + 2, integers(num_classes - 1, size, seed=i))
            for i in range(num_batches)
        ]
        for features, labels in batches:
            statistics.update(features, labels)
        return statistics, torch.cat([f for f, _ in batches]), torch.cat([y for _, y in batches])

    def test_follows_equation_17(self, module, kind):
        statistics = module(5, 4, kind)
        state = statistics.covariance.double(), statistics.mean.double(), statistics.count.clone()
        for seed in range(6):
            features, labels = normal(9, 4, seed=seed), integers(5, 9, seed=seed)
            statistics.update(features, labels)
            state = reference.update_covariance(*state, features.double(), labels)
            assert_same(statistics.covariance, state[0], TOLERANCE)
            assert_same(statistics.mean, state[1], TOLERANCE)
            assert torch.equal(statistics.count, state[2])

    def test_equals_the_population_covariance_of_all_data(self, module, kind):
        statistics, features, labels = self.filled(module, kind)
        for y in range(4):
            members = features[labels == y].double().numpy()
            expected = np.cov(members, rowvar=False, bias=True)
            expected = torch.from_numpy(expected if kind == "full" else np.diag(expected).copy())
            assert_same(statistics.covariance[y], expected, TOLERANCE)
            assert_same(statistics.mean[y], torch.from_numpy(members.mean(0)), TOLERANCE)
            assert statistics.count[y] == len(members)

    def test_unseen_classes_have_zero_statistics(self, module, kind):
        statistics, _, _ = self.filled(module, kind)
        for buffer in (statistics.covariance, statistics.mean, statistics.count):
            assert not buffer[4].any()
            assert buffer[:4].any()

    @pytest.mark.parametrize(
        "sizes", [[120], [1] * 120, [7] * 17 + [1], [60, 1, 59]], ids=lambda s: f"{len(s)} batches"
    )
    def test_any_split_into_batches_gives_the_same_statistics(self, module, kind, sizes):
        whole, features, labels = self.filled(module, kind)
        split = module(5, 4, kind)
        for part_features, part_labels in zip(features.split(sizes), labels.split(sizes), strict=True):
            split.update(part_features, part_labels)
        assert torch.equal(split.count, whole.count)
        assert_same(split.mean, whole.mean, TOLERANCE)
        assert_same(split.covariance, whole.covariance, TOLERANCE)

    def test_order_within_a_batch_does_not_matter(self, module, kind):
        features, labels, order = normal(30, 4), integers(5, 30), torch.randperm(30)
        a, b = module(5, 4, kind), module(5, 4, kind)
        a.update(features, labels)
        b.update(features[order], labels[order])
        assert_same(b.covariance, a.covariance, TOLERANCE)

    def test_only_classes_of_the_batch_change(self, module, kind):
        statistics, _, _ = self.filled(module, kind)
        before = copy.deepcopy(statistics)
        statistics.update(normal(6, 4), torch.tensor([1, 3, 1, 1, 3, 3]))
        for name, buffer in statistics.named_buffers():
            old = before.get_buffer(name)
            for y in (0, 2, 4):
                assert torch.equal(buffer[y], old[y]), (name, y)
            for y in (1, 3):
                assert torch.equal(buffer[y], old[y]) == (name == "skipped"), (name, y)

    def test_identical_samples_have_zero_covariance(self, module, kind):
        statistics = module(3, 4, kind)
        sample = torch.tensor([[0.5, -1.25, 2.0, 8.0]])
        for _ in range(5):
            statistics.update(sample.repeat(4, 1), torch.ones(4, dtype=torch.int64))
        assert not statistics.covariance.any()
        assert torch.equal(statistics.mean[1], sample[0])
        assert statistics.count.tolist() == [0, 20, 0]

    def test_empty_batch_changes_nothing(self, module, kind):
        statistics, _, _ = self.filled(module, kind)
        before = copy.deepcopy(statistics)
        statistics.update(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
        assert_equal_states(statistics, before)

    @pytest.mark.parametrize("size", [3, 20])  # fewer and more samples than classes
    def test_rows_with_label_minus_one_are_left_out(self, module, kind, size):
        statistics, _, _ = self.filled(module, kind)
        expected = copy.deepcopy(statistics)
        features, labels = normal(size, 4, seed=9), integers(5, size, seed=9)
        labels[1], features[1] = -1, 1e4
        kept = labels != -1
        expected.update(features[kept], labels[kept])
        if module is SemanticCovariance:
            statistics._take_in(features, labels)  # the public update refuses such labels
        else:
            statistics.update(features, labels)
        for found, wanted in zip(statistics.buffers(), expected.buffers(), strict=True):
            assert_same(found, wanted, TOLERANCE)

    def test_accuracy_does_not_degrade_far_from_the_origin(self, module, kind):
        """Means of 1000: differences are taken before squares, so the error is that of the differences."""
        near, far = module(2, 3, kind), module(2, 3, kind)
        for seed in range(5):
            features = normal(20, 3, seed=seed).mul(64).round() / 64  # still exact after the shift
            near.update(features, torch.zeros(20, dtype=torch.int64))
            far.update(features + 1024, torch.zeros(20, dtype=torch.int64))
        assert_same(far.covariance, near.covariance, 1024 * 4 * EPS)


# float32 rounding of a positive semi-definite matrix of size one moves its eigenvalues by a few epsilon per dimension
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("form")
def test_stays_symmetric_and_positive_semi_definite_after_100_000_updates(kind):
    num_classes, num_features = 2, 4
    statistics = SemanticCovariance(num_classes, num_features, kind)
    # rank-deficient in one direction: rounding would show in the zero eigenvalue
    directions = normal(num_features - 1, num_features, seed=1)
    features = normal(50, num_features - 1) @ directions
    labels = integers(num_classes, 50)
    batches = list(zip(features.split(1), labels.split(1), strict=True))
    state = tuple(statistics.buffers())
    update = torch_impl_module("covariance_update").covariance_update  # update() without its checks, for speed
    for _ in range(100_000 // len(batches)):
        for one_feature, one_label in batches:
            update(*state, one_feature, one_label)
    assert int(statistics.count.sum()) == 100_000
    for y in range(num_classes):
        members = features[labels == y].double()
        expected = torch.from_numpy(np.cov(members.numpy(), rowvar=False, bias=True))
        found = statistics.covariance[y].double()
        scale = float(expected.diag().max())
        if kind == "full":
            assert (found - found.T).abs().max() <= 4 * EPS * scale
            assert torch.linalg.eigvalsh((found + found.T) / 2).min() >= -4 * num_features * EPS * scale
        else:
            assert (found >= 0).all()
            expected = expected.diag()
        # 100,000 roundings of half an epsilon in random directions: a few hundred epsilon at worst
        assert (found - expected).abs().max() <= 300 * EPS * scale


@pytest.mark.parametrize("kind", KINDS)
class TestCovarianceState:
    def test_state_dict_round_trip_is_bit_exact(self, kind):
        original = SemanticCovariance(5, 4, kind)
        original.update(normal(20, 4), integers(5, 20))
        restored = SemanticCovariance(5, 4, kind)
        restored.load_state_dict(original.state_dict())
        assert_equal_states(restored, original)
        for statistics in (original, restored):
            statistics.update(normal(20, 4, seed=1), integers(5, 20, seed=1))
        assert_equal_states(restored, original)

    def test_reset_restores_the_initial_state(self, kind):
        statistics = SemanticCovariance(5, 4, kind)
        statistics.update(normal(20, 4), integers(5, 20))
        statistics.reset()
        assert_equal_states(statistics, SemanticCovariance(5, 4, kind))
        assert not any(buffer.any() for buffer in statistics.buffers())

    def test_shapes_and_dtypes(self, kind):
        statistics = SemanticCovariance(5, 4, kind)
        assert statistics.covariance.shape == ((5, 4, 4) if kind == "full" else (5, 4))
        assert (statistics.mean.shape, statistics.count.shape) == ((5, 4), (5,))
        assert statistics.covariance.dtype == statistics.mean.dtype == torch.float32
        assert kind in repr(statistics)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
    def test_statistics_are_accumulated_in_float32_for_any_dtype(self, kind, dtype):
        features = normal(20, 4).to(dtype)
        cast, plain = SemanticCovariance(5, 4, kind), SemanticCovariance(5, 4, kind)
        cast.update(features, integers(5, 20))
        plain.update(features.float(), integers(5, 20))
        assert_equal_states(cast, plain)

    def test_update_does_not_record_a_graph(self, kind):
        statistics = SemanticCovariance(5, 4, kind)
        statistics.update(normal(20, 4).requires_grad_(), integers(5, 20))
        assert not any(buffer.requires_grad for buffer in statistics.buffers())

    def test_inputs_are_not_modified(self, kind):
        features, labels = normal(20, 4), integers(5, 20)
        SemanticCovariance(5, 4, kind).update(features, labels)
        assert torch.equal(features, normal(20, 4))
        assert torch.equal(labels, integers(5, 20))

    def test_double_module_accumulates_in_float64(self, kind):
        statistics = SemanticCovariance(5, 4, kind).double()
        features = normal(20, 4).double()
        statistics.update(features, torch.zeros(20, dtype=torch.int64))
        expected = torch.from_numpy(np.cov(features.numpy(), rowvar=False, bias=True))
        assert_same(statistics.covariance[0], expected if kind == "full" else expected.diag(), 1e-14)


class Touched(TorchDispatchMode):
    """Largest number of elements that an operator reads or writes; views count as none, indexing as its selection."""

    def __init__(self):
        super().__init__()
        self.largest, self.operator = 0, None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if is_view:
            return result
        tensors = [t for t in (*args, result) if isinstance(t, torch.Tensor)]
        if func._opname in ("index", "index_select", "index_add_", "index_copy_"):
            tensors = tensors[1:-1] if func._opname.endswith("_") else [result]
        size = max((t.numel() for t in tensors), default=0)
        if size > self.largest:
            self.largest, self.operator = size, func
        return result


@pytest.mark.parametrize("elsewhere", [False, True], ids=["CPU", "device"])
@pytest.mark.parametrize("kind", KINDS)
def test_update_touches_only_classes_in_the_batch(kind, elsewhere):
    num_classes, num_features, size = 50, 16, 3
    statistics = SemanticCovariance(num_classes, num_features, kind)
    covariance = statistics.covariance.as_subclass(Elsewhere) if elsewhere else statistics.covariance
    update = torch_impl_module("covariance_update").covariance_update
    features, labels = normal(size, num_features), torch.tensor([4, 30, 4])
    with closed_form("operators"), Touched() as touched:
        update(covariance, statistics.mean, statistics.count, statistics.skipped, features, labels)
    assert touched.largest <= size * statistics.covariance[0].numel(), touched.operator
    assert touched.largest >= num_features


# --- CurriculumThreshold -------------------------------------------------------------------------------------------


class NaiveCurriculum:
    """Naive implementation that recounts everything in every update."""

    def __init__(self, num_classes, threshold, mapping):
        self.memory, self.num_classes, self.threshold, self.mapping = {}, num_classes, threshold, mapping

    def update(self, index, prediction, selected):
        for i, y, take in zip(index.tolist(), prediction.tolist(), selected.tolist(), strict=True):
            if take:
                self.memory[i] = y

    @property
    def counts(self):
        return [list(self.memory.values()).count(y) for y in range(self.num_classes)]

    @property
    def thresholds(self):
        largest = max(max(self.counts), 1)
        progress = [count / largest for count in self.counts]
        if self.mapping == "convex":
            progress = [eta / (2 - eta) for eta in progress]
        return torch.tensor([self.threshold * eta for eta in progress])


@pytest.mark.parametrize("mapping", ["linear", "convex"])
class TestCurriculumThreshold:
    @pytest.mark.parametrize("seed", range(5))
    def test_equals_a_naive_recount(self, mapping, seed):
        """Random batches with repeated instances: 12 entries out of 20 instances."""
        curriculum = CurriculumThreshold(20, 4, 0.75, mapping)
        naive = NaiveCurriculum(4, 0.75, mapping)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(40):
            size = int(torch.randint(0, 13, (), generator=generator))
            index = torch.randint(20, (size,), generator=generator)
            prediction = torch.randint(4, (size,), generator=generator)
            selected = torch.rand(size, generator=generator) < 0.4
            curriculum.update(index, prediction, selected)
            naive.update(index, prediction, selected)
            assert curriculum.count[:4].tolist() == naive.counts
            torch.testing.assert_close(curriculum.thresholds, naive.thresholds, rtol=4 * EPS, atol=0)

    def test_last_selected_occurrence_of_an_instance_counts(self, mapping):
        curriculum = CurriculumThreshold(5, 4, mapping=mapping)
        index = torch.tensor([2, 2, 0, 2])
        curriculum.update(index, torch.tensor([1, 3, 0, 0]), torch.tensor([True, True, True, False]))
        assert curriculum.count[:4].tolist() == [1, 0, 0, 1]
        curriculum.update(index, torch.tensor([2, 2, 1, 1]), torch.tensor([False, False, False, True]))
        assert curriculum.count[:4].tolist() == [1, 1, 0, 0]

    def test_thresholds_are_zero_before_the_first_selection(self, mapping):
        curriculum = CurriculumThreshold(5, 4, mapping=mapping)
        assert torch.equal(curriculum.thresholds, torch.zeros(4))
        curriculum.update(torch.arange(5), torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.bool))
        assert torch.equal(curriculum.thresholds, torch.zeros(4))

    def test_mapping(self, mapping):
        curriculum = CurriculumThreshold(10, 3, 0.8, mapping)
        prediction = torch.tensor([0, 0, 0, 0, 1, 1])
        curriculum.update(torch.arange(6), prediction, torch.ones(6, dtype=torch.bool))
        half = 0.5 if mapping == "linear" else 1 / 3
        torch.testing.assert_close(curriculum.thresholds, torch.tensor([0.8, 0.8 * half, 0.0]))

    def test_state_dict_round_trip(self, mapping):
        original = CurriculumThreshold(20, 4, mapping=mapping)
        original.update(torch.arange(10), integers(4, 10), torch.ones(10, dtype=torch.bool))
        restored = CurriculumThreshold(20, 4, mapping=mapping)
        restored.load_state_dict(original.state_dict())
        assert torch.equal(restored.thresholds, original.thresholds)
        for curriculum in (original, restored):
            curriculum.update(torch.arange(5, 15), integers(4, 10, seed=1), torch.ones(10, dtype=torch.bool))
        assert_equal_states(restored, original)

    def test_reset_restores_the_initial_state(self, mapping):
        curriculum = CurriculumThreshold(20, 4, mapping=mapping)
        curriculum.update(torch.arange(10), integers(4, 10), torch.ones(10, dtype=torch.bool))
        assert curriculum.thresholds.any()
        curriculum.reset()
        assert_equal_states(curriculum, CurriculumThreshold(20, 4, mapping=mapping))

    def test_update_touches_only_the_batch(self, mapping):
        curriculum = CurriculumThreshold(1000, 4, mapping=mapping)
        state, batch = (curriculum.assigned, curriculum.count), (torch.tensor([3, 998, 3]), torch.tensor([0, 1, 2]))
        with Touched() as touched:
            curriculum_update(CurriculumBatch(*state, *batch, torch.ones(3, dtype=torch.bool), None, 1.0))
        assert 3 <= touched.largest <= 5, touched.operator

    def test_repr_shows_the_mapping(self, mapping):
        assert mapping in repr(CurriculumThreshold(20, 4, mapping=mapping))


# --- SemanticUpperBoundLoss ----------------------------------------------------------------------------------------


def step_inputs(seed):
    problem = make_problem(6, 9, 5, 4, dtype=torch.float32, seed=seed)
    arguments = (
        problem.labeled_logits,
        problem.weak_logits,
        problem.strong_logits,
        problem.weight,
        problem.labels,
        problem.candidates,
    )
    options = {"labeled_features": normal(6, 4, seed=seed), "index": integers(30, 9, seed=seed), "strength": STRENGTH}
    return problem, arguments, options


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mapping", ["linear", "convex"])
class TestSemanticUpperBoundLoss:
    def make(self, kind, mapping, **options):
        return SemanticUpperBoundLoss(30, 5, 4, covariance=kind, mapping=mapping, threshold=0.6, **options)

    @pytest.mark.parametrize("inside", [True, False], ids=["argmax in candidates", "argmax anywhere"])
    def test_equals_manual_composition_of_update_loss_and_record(self, kind, mapping, inside):
        criterion = self.make(kind, mapping, argmax_in_candidates=inside, beta=0.7)
        statistics, curriculum = SemanticCovariance(5, 4, kind), CurriculumThreshold(30, 5, 0.6, mapping)
        selections = 0
        for seed in range(5):
            problem, arguments, options = step_inputs(seed)
            extra = {"ss_weight": 0.3, "labeled_candidates": problem.labeled_candidates}
            found = criterion(*arguments, **options, **extra)
            statistics.update(options["labeled_features"], problem.labels)
            expected = plsp_kernels.semantic_upper_bound_loss(
                *arguments[:4],
                statistics.covariance,
                *arguments[4:],
                strength=STRENGTH,
                thresholds=curriculum.thresholds,
                beta=0.7,
                argmax_in_candidates=inside,
                **extra,
            )
            # counting uses the largest threshold τ0, not the threshold of the class
            selected = expected.confidence >= 0.6
            if inside:
                selected &= problem.candidates.gather(1, expected.prediction[:, None])[:, 0]
            curriculum.update(options["index"], expected.prediction, selected)
            selections += int(selected.sum())
            for name, value in expected._asdict().items():
                assert torch.equal(getattr(found, name), value), name
        assert selections
        assert_equal_states(criterion.covariance, statistics)
        assert_equal_states(criterion.curriculum, curriculum)

    def test_evaluation_mode_changes_no_state(self, kind, mapping):
        criterion = self.make(kind, mapping)
        _, arguments, options = step_inputs(0)
        criterion(*arguments, **options)
        before = copy.deepcopy(criterion.state_dict())
        criterion.eval()
        _, arguments, options = step_inputs(1)
        first, second = criterion(*arguments, **options), criterion(*arguments, **options)
        assert all(torch.equal(getattr(first, term), getattr(second, term)) for term in TERMS)
        assert all(torch.equal(value, before[name]) for name, value in criterion.state_dict().items())
        criterion.train()
        criterion(*arguments, **options)
        assert not torch.equal(criterion.state_dict()["covariance.count"], before["covariance.count"])

    @pytest.mark.parametrize(
        ("name", "wrong"),
        [
            ("strength", -1.0),
            ("ss_weight", math.nan),
            ("index", integers(30, 8)),
            ("labeled_candidates", torch.zeros(6, 5, dtype=torch.bool)),
            ("labeled_features", normal(5, 4)),
            ("labeled_features", normal(6, 3)),
            ("candidates", torch.zeros(9, 5, dtype=torch.bool)),
            ("strong_logits", normal(8, 5)),
        ],
    )
    def test_rejected_step_changes_no_state(self, kind, mapping, name, wrong):
        criterion = self.make(kind, mapping)
        _, arguments, options = step_inputs(0)
        criterion(*arguments, **options)
        before = copy.deepcopy(criterion.state_dict())
        names = ("labeled_logits", "weak_logits", "strong_logits", "weight", "labels", "candidates")
        with pytest.raises(ValueError, match=f"^{name} must"):
            criterion(**{**dict(zip(names, arguments, strict=True)), **options, name: wrong})
        assert all(torch.equal(value, before[name]) for name, value in criterion.state_dict().items())

    def test_state_dict_round_trip_is_bit_exact(self, kind, mapping):
        original, restored = self.make(kind, mapping), self.make(kind, mapping)
        for seed in range(2):
            _, arguments, options = step_inputs(seed)
            original(*arguments, **options)
        restored.load_state_dict(copy.deepcopy(original.state_dict()))
        _, arguments, options = step_inputs(2)
        found, expected = restored(*arguments, **options), original(*arguments, **options)
        assert torch.equal(found.total, expected.total)
        assert_equal_states(restored, original)

    def test_gradients_reach_logits_and_weight_but_not_features(self, kind, mapping):
        criterion = self.make(kind, mapping)
        _, arguments, options = step_inputs(0)
        for tensor in (*arguments[:4], options["labeled_features"]):
            tensor.requires_grad_()
        # twice: the second call updates the statistics in place before the second backward
        for _ in range(2):
            criterion(*arguments, **options).total.backward()
        assert all(tensor.grad.any() for tensor in arguments[:4])
        assert options["labeled_features"].grad is None


@pytest.mark.parametrize("kind", KINDS)
class TestSemanticCrossEntropyLoss:
    def inputs(self, seed=0):
        logits, weight, features = normal(9, 5, seed=seed), normal(5, 4, seed=seed + 1), normal(9, 4, seed=seed + 2)
        return (logits.requires_grad_(), weight.requires_grad_(), integers(5, 9, seed)), features.requires_grad_()

    def test_equals_manual_composition_of_update_and_loss(self, kind):
        options = {"class_weight": torch.arange(1.0, 6.0), "label_smoothing": 0.1, "reduction": "sum"}
        criterion, statistics = SemanticCrossEntropyLoss(5, 4, kind, **options), SemanticCovariance(5, 4, kind)
        for seed in range(3):
            (logits, weight, labels), features = self.inputs(seed)
            found = criterion(logits, weight, labels, features=features, strength=0.5)
            statistics.update(features, labels)
            samples = logits, weight, statistics.covariance, labels
            assert torch.equal(found, plsp_kernels.semantic_cross_entropy(*samples, strength=0.5, **options))
            assert_equal_states(criterion.covariance, statistics)

    def test_gradients_reach_logits_and_weight_but_not_features(self, kind):
        criterion = SemanticCrossEntropyLoss(5, 4, kind)
        arguments, features = self.inputs()
        # twice: the second call updates the statistics in place before the second backward
        for _ in range(2):
            criterion(*arguments, features=features, strength=0.5).backward()
        assert all(tensor.grad.any() for tensor in arguments[:2])
        assert features.grad is None

    def test_evaluation_mode_changes_no_state(self, kind):
        criterion = SemanticCrossEntropyLoss(5, 4, kind)
        arguments, features = self.inputs()
        trained = criterion(*arguments, features=features, strength=0.5)
        before = copy.deepcopy(criterion)
        criterion.eval()
        assert torch.equal(criterion(*arguments, features=features, strength=0.5), trained)
        assert_equal_states(criterion, before)

    @pytest.mark.parametrize("ignore_index", [-100, 3])
    def test_ignored_rows_enter_neither_loss_nor_covariances(self, kind, ignore_index):
        (logits, weight, labels), features = self.inputs()
        labels = torch.where(labels == 3, ignore_index, labels)
        labels[2] = ignore_index
        ignoring, fed = (SemanticCrossEntropyLoss(5, 4, kind, ignore_index=ignore_index) for _ in range(2))
        kept = labels != ignore_index
        found = ignoring(logits, weight, labels, features=features, strength=0.5)
        wanted = fed(logits[kept], weight, labels[kept], features=features[kept], strength=0.5)
        assert_same(found.detach(), wanted.detach(), 4 * EPS)
        assert_equal_states(ignoring, fed)

    @pytest.mark.parametrize(
        ("name", "wrong"),
        [("logits", torch.zeros(8, 5)), ("labels", torch.full((9,), 5)), ("features", torch.zeros(9, 3)),
         ("strength", -1.0)],
    )  # fmt: skip
    def test_rejected_batch_changes_no_state(self, kind, name, wrong):
        criterion = SemanticCrossEntropyLoss(5, 4, kind)
        (logits, weight, labels), features = self.inputs()
        given = {"logits": logits, "weight": weight, "labels": labels, "features": features, "strength": 0.5}
        with pytest.raises(ValueError, match=r"^(logits|labels|features|strength) must"):
            criterion(**given | {name: wrong})
        assert not criterion.covariance.count.any()

    def test_state_dict_round_trip_is_bit_exact(self, kind):
        original, restored = (
            SemanticCrossEntropyLoss(5, 4, kind, class_weight=torch.arange(1.0, 6.0)) for _ in range(2)
        )
        arguments, features = self.inputs()
        original(*arguments, features=features, strength=0.5)
        restored.load_state_dict(copy.deepcopy(original.state_dict()))
        assert_equal_states(restored, original)

    def test_compiled_module_equals_eager(self, kind):
        eager = SemanticCrossEntropyLoss(5, 4, kind, ignore_index=1)
        compiled = torch.compile(copy.deepcopy(eager), fullgraph=True, backend="aot_eager")
        arguments, features = self.inputs()
        found, wanted = (module(*arguments, features=features, strength=0.5) for module in (compiled, eager))
        assert torch.equal(found, wanted)
        gradients = [torch.autograd.grad(loss, arguments[:2]) for loss in (found, wanted)]
        assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
        assert_equal_states(compiled, eager)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"reduction": "average"}, "reduction"), ({"label_smoothing": 2.0}, "label_smoothing"), ({"impl": "c"}, "impl"),
     ({"covariance": "dense"}, "kind"), ({"class_weight": torch.ones(4)}, "class_weight")],
)  # fmt: skip
def test_invalid_options_of_the_cross_entropy_are_refused_at_construction(options, message):
    with pytest.raises(ValueError, match=f"^{message} must"):
        SemanticCrossEntropyLoss(5, 4, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_backward_is_valid_after_a_later_update(kind, impl):
    """Statistics may be updated between forward and backward, or two steps may share one backward."""
    gradients = []
    for interfere in (False, True):
        problem = make_problem(6, 9, 5, 4, dtype=torch.float32).leaves()
        statistics = SemanticCovariance(5, 4, kind)
        statistics.update(normal(20, 4), integers(5, 20))
        loss = problem.map(lambda _, s=statistics: s.covariance, ["covariance"]).loss(impl=impl)
        if interfere:
            statistics.update(10 * normal(20, 4, seed=1), integers(5, 20, seed=1))
        gradients.append(problem.gradients(loss.total)["weight"])
    assert torch.equal(*gradients)
