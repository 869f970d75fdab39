"""The torch.library operators: opcheck, torch.compile, autocast."""

import shutil

import pytest
import torch
from torch import nn

import plsp_kernels
from cases import DIFFERENTIABLE, KINDS, STRENGTH, TERMS, assert_same, make_problem
from plsp_kernels import native, torch_impl
from plsp_kernels.rows import class_slots

NUM_CLASSES, NUM_FEATURES = 5, 6


# --- opcheck -------------------------------------------------------------------------------------------------------


def operator_inputs(name: str, kind: str, empty: bool, dtype: torch.dtype) -> list[tuple]:
    """Arguments as the public functions pass them, with and without optional ones."""
    problem = make_problem(*(0, 0) if empty else (3, 4), kind=kind, dtype=dtype)
    labels = torch.cat([problem.labels, problem.pseudo_labels])
    classes, slots = class_slots(labels, 7)
    logits = torch.cat([problem.labeled_logits, problem.strong_logits, problem.weak_logits])
    row_slots = torch.cat([slots, slots[problem.labels.shape[0] :]])
    gram, product = torch.ops.plsp.class_gram(problem.weight, problem.covariance, classes, True, "torch")
    symmetric = gram + gram.mT
    strength, large_strength = torch.tensor(STRENGTH), torch.tensor(300.0)
    rows = logits, gram, row_slots, strength
    log_odds = torch.ops.plsp.log_odds(*rows, "torch")
    labeled = problem.labeled_logits, problem.weight, problem.covariance, problem.labels
    weighted = problem.class_thresholds, strength, 0.1, -100
    flags = [(True, True), (True, False), (False, True), (False, False)]
    views = problem.labeled_logits, problem.weak_logits, problem.strong_logits
    step = *views, problem.weight, problem.covariance, problem.labels, problem.candidates
    half, threshold = (*(view.half() for view in views), *step[3:]), torch.tensor(0.5, dtype=torch.float64)
    upstream = torch.tensor([0.5, 0.0, 2.0], dtype=dtype)
    served_by_native = [(None,), (upstream,)] if native.VERSIONS and not empty else []
    last = problem.class_thresholds, strength, torch.tensor(0.7, dtype=torch.float64), 1.2
    statistics = problem.covariance, torch.zeros_like(problem.weight), *torch.zeros(2, 7, dtype=torch.int64)
    unlabeled = torch.arange(problem.candidates.shape[0])
    assignments = torch.full((9,), 7), torch.tensor([0, 0, 0, 0, 0, 0, 0, 9])
    return {
        "class_activation_labels": [(problem.weak_logits, problem.candidates, "torch")],
        "class_gram": [
            (problem.weight, problem.covariance, classes, True, "torch"),
            (problem.weight, problem.covariance, classes, False, "torch"),
            (problem.weight.T.contiguous().T, problem.covariance, classes, True, "torch"),
        ],
        "class_gram_backward": [
            (symmetric, problem.weight, problem.covariance, classes, product, "torch"),
            (symmetric, problem.weight.T.contiguous().T, problem.covariance, classes, product, "torch"),
        ],
        "log_odds": [(*rows, "torch"), (*rows[:3], large_strength, "torch")],
        "log_odds_backward": [(*rows, log_odds, log_odds, *flag, "torch") for flag in flags],
        "probit_probabilities": [(*rows, 1.2, "torch")],
        "upper_bound": [
            *((*step, problem.pseudo_labels, None, *last, True, None, *flag, "torch") for flag in flags),
            (*step, None, problem.labeled_candidates, *last, False, upstream, True, True, "torch"),
            (*half, problem.pseudo_labels, None, threshold, *last[1:], True, None, True, True, "torch"),
            *((*step, None, None, *last, True, *more, True, True, "native") for more in served_by_native),
        ],
        "covariance_update": [
            (*statistics, problem.weight[: labels.shape[0]], labels, impl)
            for impl in (("torch", "native") if native.VERSIONS else ("torch",))
        ],
        "cross_entropy": [
            *((*labeled, None, strength, 0.0, 2, "mean", None, *flag, "torch") for flag in flags),
            (labeled[0].half(), *labeled[1:], *weighted, "sum", None, True, True, "torch"),
            (*labeled, *weighted, "none", None, False, False, "torch"),
            (*labeled, *weighted, "none", labeled[0][:, 0], True, True, "torch"),
            *((*labeled, *weighted, "mean", None, *flag, "native") for flag in flags if native.VERSIONS),
        ],
        "curriculum_thresholds": [(assignments[1], 0.7, convex, "torch") for convex in (False, True)],
        "curriculum_update": [
            (*assignments, unlabeled, problem.pseudo_labels, problem.weak_logits[:, 0], sets, 0.5, "torch")
            for sets in (problem.candidates, None)
        ],
    }[name]


OPERATORS = (
    "class_activation_labels",
    "class_gram",
    "class_gram_backward",
    "covariance_update",
    "cross_entropy",
    "curriculum_thresholds",
    "curriculum_update",
    "log_odds",
    "log_odds_backward",
    "probit_probabilities",
    "upper_bound",
)


NATIVE = ("class_activation_labels", "covariance_update", "cross_entropy", "upper_bound")
NATIVE_OPERATORS = [(name, "native") for name in NATIVE] if native.VERSIONS else []


@pytest.mark.parametrize("empty", [False, True], ids=["", "no samples"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck_passes(name, kind, empty):
    for arguments in operator_inputs(name, kind, empty, torch.float32):
        torch.library.opcheck(getattr(torch.ops.plsp, name).default, arguments)


def test_every_operator_has_an_opcheck():
    registered = {
        name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "plsp::" in name
    }
    assert registered == set(OPERATORS)


# --- wrong tensors -------------------------------------------------------------------------------------------------

DAMAGES = {
    "dtype": lambda tensor: tensor.to(torch.int32),
    "dimension": lambda tensor: tensor[None],
    "size": lambda tensor: tensor[..., :-1],
}
# Another number of slots, instances or classes, and a confidence of any dtype.
STILL_VALID = {
    ("class_gram", "classes", "size"),
    ("curriculum_update", "assigned", "size"),
    ("curriculum_update", "confidence", "dtype"),
    ("curriculum_thresholds", "counts", "size"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "impl"), [*((name, "triton") for name in OPERATORS), *NATIVE_OPERATORS])
def test_wrong_tensors_are_refused_before_their_memory_is_read(name, impl, kind, damage):
    if impl == "triton":
        pytest.importorskip("triton", minversion="3.5")
    operator = getattr(torch.ops.plsp, name).default
    *arguments, _ = operator_inputs(name, kind, False, torch.float32)[0]
    for position, (argument, value) in enumerate(zip(operator._schema.arguments, arguments, strict=False)):
        # C is given numbers, not addresses, in place of 0-d tensors.
        if not isinstance(value, torch.Tensor) or (value.dim() == 0 and (damage == "size" or impl == "native")):
            continue
        if (name, argument.name, damage) not in STILL_VALID:
            wrong = [*arguments[:position], DAMAGES[damage](value), *arguments[position + 1 :]]
            with pytest.raises(
                (ValueError, TypeError, IndexError), match="must (be|have)" if impl == "triton" else None
            ):
                operator(*wrong, impl)


# --- torch.compile -------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """A linear classifier: W receives gradients from the logits and from the transformation."""

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


def training_step(model, data, strength, impl="auto"):
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
    # fewer and more samples than classes, which assign slots differently
    @pytest.mark.parametrize("sizes", [(1, 2), (4, 6), (8, 11)], ids=str)
    def test_training_step_equals_eager(self, sizes, backend):
        if backend == "inductor" and sizes != (8, 11):
            pytest.skip("one size is enough for the slow backend")
        model, data = Model(), batch(*sizes)
        expected = run(training_step, model, data, STRENGTH)
        compiled = torch.compile(training_step, fullgraph=True, backend=backend)
        assert_equal_runs(run(compiled, model, data, STRENGTH), expected)

    @pytest.mark.skipif(torch.__version__ < "2.7", reason="its dynamo does not trace .item() of a CPU tensor")
    def test_reference_training_step_equals_eager(self):
        model, data = Model(), batch(2, 3)
        expected = run(training_step, model, data, STRENGTH, "reference")
        compiled = torch.compile(training_step, fullgraph=True, backend="aot_eager")
        assert_equal_runs(run(compiled, model, data, STRENGTH, "reference"), expected)

    def test_dynamic_shapes_share_one_graph_across_batch_sizes(self):
        model = Model()
        compiled = torch.compile(training_step, fullgraph=True, backend="aot_eager", dynamic=True)
        # no batch size equals a layer size: torch.compile would treat equal sizes as one symbol
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
        """The schedule changes it every epoch."""
        model, data = Model(), batch(4, 6)
        compiled = torch.compile(training_step, fullgraph=True, backend="aot_eager")
        results = []
        for strength in (0.0, 0.1, 0.2, 0.35):
            found = run(compiled, model, data, strength)
            assert_equal_runs(found, run(training_step, model, data, strength))
            results.append(float(found[0]))
        assert len(set(results)) == len(results)

    def test_changing_strength_and_weight_do_not_recompile(self):
        """A schedule changes both every epoch: after the values 0, constant and symbolic, nothing recompiles."""
        problem = make_problem(4, 6, dtype=torch.float32)

        def step(strength, ss_weight):
            return problem.loss(impl="torch", strength=strength, ss_weight=ss_weight).total

        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        for epoch in range(4):
            compiled(0.01 * epoch, 0.1 * epoch)
        with torch.compiler.set_stance("fail_on_recompile"):
            found = compiled(0.3, 0.7)
        assert_same(found, step(0.3, 0.7), 1e-6)

    def test_numbers_given_as_tensors_share_one_graph(self):
        problem = make_problem(4, 6, dtype=torch.float32)

        def step(*numbers):
            options = dict(zip(("strength", "ss_weight", "thresholds"), numbers, strict=True))
            return problem.loss(impl="torch", **options).total

        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        first, second = torch.tensor([0.1, 1.0, 0.5]), torch.tensor([0.3, 0.7, 0.1])
        compiled(*first)
        with torch.compiler.set_stance("fail_on_recompile"):
            found = compiled(*second)
        assert_same(found, step(*second), 1e-6)
        assert found != step(*first)

    def test_backward_of_the_total_does_not_differentiate_the_terms(self, monkeypatch):
        """Its gradients are precomputed; only differentiating a single term computes the step again."""
        calls = []
        original = torch_impl.upper_bound
        monkeypatch.setattr(torch_impl, "upper_bound", lambda *args: calls.append(1) or original(*args))
        problem = make_problem(8, 11).leaves()

        def step(problem, term):
            loss = problem.loss(impl="torch")
            return getattr(loss, term), loss.supervised.detach()

        for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
            calls.clear()
            function(problem, "total")[0].backward()
            assert len(calls) == 1
        calls.clear()
        step(problem, "supervised")[0].backward()
        assert len(calls) == 2

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("kind", KINDS)
    def test_stateful_module_equals_eager(self, kind, backend):
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
            if name != "covariance.skipped":  # all samples are finite
                assert expected.any(), f"{name} was never written"


# --- autocast ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("impl", "backward_inside"),
    [("torch", False), ("torch", True), ("reference", False)],
    ids=["torch", "torch, backward inside", "reference"],
)
class TestAutocast:
    """Autocast affects the user's layers only; the library computes in float32, bit for bit.

    Calling backward inside the region is discouraged by PyTorch, and casts plain autograd operations.
    """

    def test_loss_is_bit_exact(self, dtype, impl, backward_inside):
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

    def test_functions_are_bit_exact(self, dtype, impl, backward_inside):
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
    """The logits come from half-precision layers: the loss changes only by their rounding."""
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


def test_compiled_autocast_step_equals_eager():
    def step(model, data, strength):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return training_step(model, data, strength)

    model, data = Model(), batch(4, 6)
    expected = run(step, model, data, STRENGTH)
    found = run(torch.compile(step, fullgraph=True, backend="aot_eager"), model, data, STRENGTH)
    for a, b in zip(found[:-2], expected[:-2], strict=True):
        assert_same(a, b, 2 * torch.finfo(torch.bfloat16).eps)
