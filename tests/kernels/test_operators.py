"""The torch.library operators: opcheck, torch.compile, autocast."""

import shutil

import pytest
import torch
from torch import nn

import plsp_kernels
from cases import DIFFERENTIABLE, KINDS, STRENGTH, TERMS, assert_same, make_problem
from plsp_kernels import torch_impl
from plsp_kernels.slots import class_slots

NUM_CLASSES, NUM_FEATURES = 5, 6


# --- opcheck -------------------------------------------------------------------------------------------------------


def operator_inputs(name: str, kind: str, empty: bool, dtype: torch.dtype) -> list[tuple]:
    """Arguments for the operator as the public functions pass them: with and without what is optional."""
    problem = make_problem(*(0, 0) if empty else (2, 4), kind=kind, dtype=dtype)
    labels = torch.cat([problem.labels, problem.pseudo_labels])
    classes, slots = class_slots(labels, 7)
    rows = torch.cat([problem.labeled_logits, problem.strong_logits, problem.weak_logits])
    row_slots = torch.cat([slots, slots[problem.labels.shape[0] :]])
    gram, product = torch.ops.plsp.class_gram(problem.weight, problem.covariance, classes, True, "torch")
    symmetric = gram + gram.mT
    strength, large_strength = torch.tensor(STRENGTH), torch.tensor(300.0)
    odds = torch.ops.plsp.log_odds(rows, gram, row_slots, strength, "torch")
    labeled, labeled_slots = problem.labeled_logits, slots[: problem.labels.shape[0]]
    target_odds = torch.ops.plsp.target_log_odds(labeled, gram, labeled_slots, problem.labels, strength, "torch")
    flags = [(True, True), (True, False), (False, True), (False, False)]
    logits = labeled, problem.strong_logits, problem.weak_logits
    step = *logits, problem.weight, problem.covariance, problem.labels, problem.pseudo_labels, problem.candidates
    last = problem.class_thresholds, strength, torch.tensor(0.7, dtype=torch.float64), 1.2
    statistics = problem.covariance, torch.zeros_like(problem.weight), torch.zeros(7, dtype=torch.int64)
    return {
        "class_gram": [
            (problem.weight, problem.covariance, classes, True, "torch"),
            (problem.weight, problem.covariance, classes, False, "torch"),
            (problem.weight.T.contiguous().T, problem.covariance, classes, True, "torch"),
        ],
        "class_gram_backward": [
            (symmetric, problem.weight, problem.covariance, classes, product, "torch"),
            (symmetric, problem.weight.T.contiguous().T, problem.covariance, classes, product, "torch"),
        ],
        "log_odds": [(rows, gram, row_slots, strength, "torch"), (rows, gram, row_slots, large_strength, "torch")],
        "log_odds_backward": [(odds, rows, odds, gram, row_slots, strength, *flag, "torch") for flag in flags],
        "target_log_odds": [(labeled, gram, labeled_slots, problem.labels, strength, "torch")],
        "target_log_odds_backward": [
            (target_odds, labeled, target_odds, gram, labeled_slots, problem.labels, strength, *flag, "torch")
            for flag in flags
        ],
        "probit_probabilities": [(rows, gram, row_slots, strength, 1.2, "torch")],
        "upper_bound": [
            *((*step, None, *last, True, *flag, "torch") for flag in flags),
            (*step, problem.labeled_candidates, *last, False, True, True, "torch"),
        ],
        "covariance_update": [(*statistics, problem.weight[: labels.shape[0]], labels)],
    }[name]


OPERATORS = (
    "class_gram",
    "class_gram_backward",
    "covariance_update",
    "log_odds",
    "log_odds_backward",
    "probit_probabilities",
    "target_log_odds",
    "target_log_odds_backward",
    "upper_bound",
)


@pytest.mark.parametrize("empty", [False, True], ids=["", "no samples"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck_passes(name, kind, empty):
    for arguments in operator_inputs(name, kind, empty, torch.float32):
        torch.library.opcheck(getattr(torch.ops.plsp, name).default, arguments)


def test_every_operator_is_checked():
    registered = {
        name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "plsp::" in name
    }
    assert registered == set(OPERATORS)


# --- torch.compile -------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """A linear classifier, so that W receives gradients from the logits and from the transformation."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, NUM_FEATURES)
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, x):
        features = self.body(x).tanh()
        return self.head(features), features


def batch(num_labeled, num_unlabeled, seed=0):
    problem = make_problem(num_labeled, num_unlabeled, NUM_CLASSES, NUM_FEATURES, dtype=torch.float32, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(n, 4, generator=generator) for n in (num_labeled, num_unlabeled, num_unlabeled)]
    return {
        "inputs": inputs,
        "covariance": problem.covariance,
        "labels": problem.labels,
        "candidates": problem.candidates,
        "thresholds": problem.class_thresholds,
        "index": torch.arange(num_unlabeled) * 2,
    }


def training_step(model, data, strength, impl="torch"):
    """Every public function in one step; the class activation labels feed the others."""
    (labeled, _), (weak, _), (strong, _) = (model(x) for x in data["inputs"])
    weight, covariance = model.head.weight, data["covariance"]
    classes = plsp_kernels.class_activation_labels(weak, data["candidates"])
    loss = plsp_kernels.semantic_upper_bound_loss(
        labeled,
        weak,
        strong,
        weight,
        covariance,
        data["labels"],
        data["candidates"],
        strength=strength,
        thresholds=data["thresholds"],
        impl=impl,
    )
    log_probability = plsp_kernels.semantic_log_softmax(
        strong, weight, covariance, classes, strength=strength, impl=impl
    )
    targets = plsp_kernels.probit_probabilities(weak, weight, covariance, classes, strength=strength, impl=impl)
    entropy = plsp_kernels.semantic_cross_entropy(
        labeled, weight, covariance, data["labels"], strength=strength, impl=impl
    )
    form = plsp_kernels.pairwise_quadratic_form(weight, covariance, impl=impl)
    total = loss.total - (targets * log_probability).mean() + entropy + 0.1 * form.mean()
    return total, loss.prediction, loss.mask


def run(step, model, *args):
    model.zero_grad()
    total, *others = step(model, *args)
    total.backward()
    return [total.detach(), *(p.grad.clone() for p in model.parameters()), *others]


def assert_equal_runs(found, expected):
    for a, b in zip(found, expected, strict=True):
        if a.is_floating_point():
            # the compiler may fuse and reorder float32 sums: some epsilon of the largest element
            assert_same(a, b, 16 * torch.finfo(torch.float32).eps)
        else:
            assert torch.equal(a, b)


BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor", marks=pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="no C++ compiler")
    ),
]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class TestCompile:
    @pytest.mark.parametrize("backend", BACKENDS)
    # fewer samples than classes, and more: the slots of the classes are found in two ways
    @pytest.mark.parametrize("sizes", [(1, 2), (4, 6), (8, 11)], ids=str)
    def test_training_step_equals_eager(self, sizes, backend):
        if backend == "inductor" and sizes != (8, 11):
            pytest.skip("one size is enough for the slow backend")
        model, data = Model(), batch(*sizes)
        expected = run(training_step, model, data, STRENGTH)
        compiled = torch.compile(training_step, fullgraph=True, backend=backend)
        assert_equal_runs(run(compiled, model, data, STRENGTH), expected)

    def test_reference_training_step_equals_eager(self):
        model, data = Model(), batch(2, 3)
        expected = run(training_step, model, data, STRENGTH, "reference")
        compiled = torch.compile(training_step, fullgraph=True, backend="aot_eager")
        assert_equal_runs(run(compiled, model, data, STRENGTH, "reference"), expected)

    def test_dynamic_shapes_need_one_graph_for_two_batch_sizes(self):
        model = Model()
        compiled = torch.compile(training_step, fullgraph=True, backend="aot_eager", dynamic=True)
        # no batch is as large as a layer: equal sizes are taken for the same size
        run(compiled, model, batch(8, 11), STRENGTH)
        data = batch(9, 14, seed=1)
        expected = run(training_step, model, data, STRENGTH)
        with torch.compiler.set_stance("fail_on_recompile"):
            found = run(compiled, model, data, STRENGTH)
        assert_equal_runs(found, expected)

    def test_dynamic_shapes_cross_the_number_of_classes(self):
        model = Model()
        compiled = torch.compile(training_step, fullgraph=True, backend="aot_eager", dynamic=True)
        for seed, sizes in enumerate([(1, 2), (4, 6), (2, 2)]):
            data = batch(*sizes, seed=seed)
            assert_equal_runs(run(compiled, model, data, STRENGTH), run(training_step, model, data, STRENGTH))

    def test_strength_may_change_between_calls(self):
        """As its schedule does every epoch."""
        model, data = Model(), batch(4, 6)
        compiled = torch.compile(training_step, fullgraph=True, backend="aot_eager")
        results = []
        for strength in (0.0, 0.1, 0.2, 0.35):
            found = run(compiled, model, data, strength)
            assert_equal_runs(found, run(training_step, model, data, strength))
            results.append(float(found[0]))
        assert len(set(results)) == len(results)

    def test_growing_strength_and_weight_need_no_graph_per_value(self):
        """A schedule changes both every epoch: after 0, a constant and then a variable, nothing is left to compile."""
        problem = make_problem(4, 6, dtype=torch.float32)

        def step(strength, ss_weight):
            return problem.loss(impl="torch", strength=strength, ss_weight=ss_weight).total

        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        for epoch in range(4):
            compiled(0.01 * epoch, 0.1 * epoch)
        with torch.compiler.set_stance("fail_on_recompile"):
            found = compiled(0.3, 0.7)
        assert_same(found, step(0.3, 0.7), 1e-6)

    def test_training_with_the_total_alone_pulls_no_terms(self, monkeypatch):
        """Its gradients are known; only a term that is differentiated by itself needs another pass over the pairs."""
        calls = []
        original = torch_impl.log_odds_backward
        monkeypatch.setattr(torch_impl, "log_odds_backward", lambda *args: calls.append(1) or original(*args))
        problem = make_problem(8, 11).leaves()

        def step(problem, term):
            loss = problem.loss(impl="torch")
            return getattr(loss, term), loss.supervised.detach()

        for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
            function(problem, "total")[0].backward()
            assert not calls
        step(problem, "supervised")[0].backward()
        assert len(calls) == 1

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("kind", KINDS)
    def test_module_with_its_state_equals_eager(self, kind, backend):
        if backend == "inductor" and kind == "diagonal":
            pytest.skip("one kind is enough for the slow backend")
        model = Model()

        def step(model, criterion, data):
            (labeled, features), (weak, _), (strong, _) = (model(x) for x in data["inputs"])
            loss = criterion(
                labeled,
                weak,
                strong,
                model.head.weight,
                data["labels"],
                data["candidates"],
                labeled_features=features,
                index=data["index"],
                strength=STRENGTH,
            )
            return loss.total, loss.prediction, loss.mask

        compiled = torch.compile(step, fullgraph=True, backend=backend)
        criteria = [
            plsp_kernels.SemanticUpperBoundLoss(40, NUM_CLASSES, NUM_FEATURES, covariance=kind, threshold=0.2)
            for _ in range(2)
        ]
        for seed in range(3):
            data = batch(4, 6, seed)
            assert_equal_runs(run(compiled, model, criteria[0], data), run(step, model, criteria[1], data))
        for (name, found), expected in zip(criteria[0].named_buffers(), criteria[1].buffers(), strict=True):
            assert_equal_runs([found], [expected])
            assert expected.any(), f"{name} was never written"


# --- autocast ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("impl", "backward_inside"),
    [("torch", False), ("torch", True), ("reference", False)],
    ids=["torch", "torch, backward inside", "reference"],
)
class TestAutocast:
    """Autocast casts the user's layers; the library's own products stay in float32, so it changes no bit.

    A backward inside the region is against PyTorch's advice, and casts whatever plain autograd does there.
    """

    def test_changes_no_bit_of_the_loss(self, dtype, impl, backward_inside):
        problem = make_problem(6, 9, dtype=torch.float32)
        problem = problem.map(lambda t: t.to(dtype), ["labeled_logits", "weak_logits", "strong_logits"])
        plain, cast = problem.leaves(), problem.leaves()
        expected = plain.loss(impl=impl)
        expected_gradients = plain.gradients(expected.total)
        with torch.autocast("cpu", dtype=dtype):
            found = cast.loss(impl=impl)
            if backward_inside:
                gradients = cast.gradients(found.total)
        if not backward_inside:
            gradients = cast.gradients(found.total)
        for term in TERMS:
            assert getattr(found, term).dtype == torch.float32
            assert torch.equal(getattr(found, term), getattr(expected, term)), term
        assert torch.equal(found.confidence, expected.confidence)
        for name in DIFFERENTIABLE:
            assert gradients[name].dtype == getattr(problem, name).dtype
            assert torch.equal(gradients[name], expected_gradients[name]), name

    def test_changes_no_bit_of_the_functions(self, dtype, impl, backward_inside):
        problem = make_problem(6, 9, dtype=torch.float32).map(lambda t: t.to(dtype), ["weak_logits"])
        samples = problem.weight, problem.covariance, problem.pseudo_labels
        functions = {
            "log_softmax": lambda p: plsp_kernels.semantic_log_softmax(
                p.weak_logits, p.weight, *samples[1:], strength=STRENGTH, impl=impl
            ),
            "cross_entropy": lambda p: plsp_kernels.semantic_cross_entropy(
                p.weak_logits, p.weight, *samples[1:], strength=STRENGTH, impl=impl
            ),
            "quadratic_form": lambda p: plsp_kernels.pairwise_quadratic_form(p.weight, p.covariance, impl=impl),
            "probit": lambda p: plsp_kernels.probit_probabilities(
                p.weak_logits, p.weight, *samples[1:], strength=STRENGTH, impl=impl
            ),
        }
        for name, function in functions.items():
            plain, cast = problem.leaves(), problem.leaves()
            expected = function(plain)
            with torch.autocast("cpu", dtype=dtype):
                found = function(cast)
                assert found.dtype == expected.dtype
                assert torch.equal(found, expected), name
                if found.requires_grad and backward_inside:
                    found.sum().backward()
            if found.requires_grad:
                if not backward_inside:
                    found.sum().backward()
                expected.sum().backward()
                assert torch.equal(cast.weight.grad, plain.weight.grad), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_training_step_under_autocast_is_close_to_float32(dtype):
    """The logits are those of half-precision layers: the loss moves by their rounding and no more."""
    model, data = Model(), batch(4, 6)
    expected = run(training_step, model, data, STRENGTH)

    def step(*args):
        with torch.autocast("cpu", dtype=dtype):
            return training_step(*args)

    found = run(step, model, data, STRENGTH)
    for a, b in zip(found[:-2], expected[:-2], strict=True):
        assert a.dtype == torch.float32
        assert_same(a, b, 8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_statistics_are_kept_in_float32_under_autocast(dtype):
    statistics = [plsp_kernels.SemanticCovariance(4, 3) for _ in range(2)]
    features = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(10) % 4
    statistics[0].update(features, labels)
    with torch.autocast("cpu", dtype=dtype):
        statistics[1].update(features, labels)
    for plain, cast in zip(statistics[0].buffers(), statistics[1].buffers(), strict=True):
        assert torch.equal(cast, plain)


def test_compiled_autocast_step_equals_the_eager_one():
    def step(model, data, strength):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return training_step(model, data, strength)

    model, data = Model(), batch(4, 6)
    expected = run(step, model, data, STRENGTH)
    found = run(torch.compile(step, fullgraph=True, backend="aot_eager"), model, data, STRENGTH)
    for a, b in zip(found[:-2], expected[:-2], strict=True):
        assert_same(a, b, 2 * torch.finfo(torch.bfloat16).eps)
