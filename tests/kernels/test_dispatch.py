"""Selection of the implementation: `auto`, explicit choices, and refusals with their reasons."""

import importlib.metadata
import importlib.util

import pytest
import torch

import plsp_kernels
from cases import make_problem
from plsp_kernels import dispatch, native, reference, torch_impl

built = pytest.mark.skipif(not native.VERSIONS, reason="the C extension is not built")
SMALL, MANY_CLASSES = (6, 9, 7, 5), (30, 30, native.MOST_CLASSES + 1, 5)


@pytest.fixture
def served(monkeypatch):
    """Implementations that computed a step of the loss, in call order."""
    calls = []

    def watch(module, name, label):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: calls.append(label) or original(*args))

    watch(native, "upper_bound", "native")
    watch(torch_impl, "upper_bound", "torch")
    watch(reference, "semantic_upper_bound_loss", "reference")
    return calls


def step(shape=SMALL, dtype=torch.float32, **options):
    problem = make_problem(*shape, dtype=dtype).leaves()
    loss = problem.loss(**{"impl": "auto"} | options)
    loss.total.backward()
    return loss


class TestAuto:
    @built
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_auto_uses_native_for_small_cpu_steps(self, dtype, served):
        step((64, 256, 10, 84), dtype)
        assert served == ["native"]

    @built
    def test_native_serves_as_many_samples_as_classes(self, served):
        step((3, 4, 7, 5))
        step((3, 3, 7, 5))
        assert served == ["native", "torch"]

    @pytest.mark.parametrize(
        ("shape", "dtype"), [(SMALL, torch.float64), (MANY_CLASSES, torch.float32)], ids=["float64", "many classes"]
    )
    def test_auto_falls_back_to_operators_where_native_cannot_serve(self, shape, dtype, served):
        step(shape, dtype)
        assert served == ["torch"]

    def test_auto_uses_operators_for_large_steps(self, served, monkeypatch):
        monkeypatch.setattr(native, "MOST_PAIRS", 10)
        step()
        assert served == ["torch"]

    def test_auto_uses_operators_without_the_extension(self, served, monkeypatch):
        monkeypatch.setattr(native, "VERSIONS", ())
        step()
        assert served == ["torch"]

    def test_auto_uses_triton_for_gpu_tensors_if_it_can_serve(self, monkeypatch):
        class OnGpu:
            is_cuda = True

        for refusal, expected in ((None, "triton"), ("it is too old", "torch")):
            monkeypatch.setattr(dispatch, "_TRITON_REFUSAL", refusal)
            assert dispatch.for_rows("auto", OnGpu()) == expected

    @pytest.mark.parametrize(
        ("distribution", "version", "refusal"),
        [
            ("triton", "3.2.0", "needs Triton 3.5 or newer, found 3.2.0"),
            ("pytorch-triton-rocm", "3.4.0+git1", "needs Triton 3.5 or newer, found 3.4.0+git1"),
            ("triton", "3.5.0", None),
            ("triton", "3.10.1", None),
            ("of another name", "3.2.0", None),
        ],
    )
    def test_triton_has_to_be_recent(self, distribution, version, refusal, monkeypatch):
        def version_of(name):
            if name != distribution:
                raise importlib.metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(importlib.metadata, "version", version_of)
        found = dispatch._find_triton()
        assert found is None if refusal is None else refusal in found

    def test_small_covariance_updates_use_native(self):
        statistics = plsp_kernels.SemanticCovariance(3, 512)
        state = tuple(statistics.buffers())
        small, large = torch.empty(8, 512), torch.empty(9, 512)
        assert dispatch.for_update("auto", state, small) == ("native" if native.VERSIONS else "torch")
        assert dispatch.for_update("auto", state, large) == "torch"

    @pytest.mark.parametrize("impl", ["native", "torch", "reference"])
    def test_state_updates_without_an_implementation_of_their_own_use_operators(self, impl):
        statistics = plsp_kernels.SemanticCovariance(3, 5).double()
        state = tuple(statistics.buffers())
        assert dispatch.for_curriculum(impl, statistics.count) == "torch"
        if impl != "native":
            assert dispatch.for_update(impl, state, torch.empty(8, 5)) == "torch"


class TestExplicitChoice:
    @pytest.mark.parametrize("impl", ["native", "torch", "reference"])
    def test_no_implementation_calls_another(self, impl, served):
        """Not even to differentiate a single term, which computes the step again."""
        if impl == "native" and not native.VERSIONS:
            pytest.skip("the C extension is not built")
        step(impl=impl)
        assert served == [impl]
        make_problem(*SMALL, dtype=torch.float32).leaves().loss(impl=impl).supervised.backward()
        assert set(served) == {impl}

    @built
    def test_explicit_native_serves_batches_too_large_for_auto(self, served, monkeypatch):
        monkeypatch.setattr(native, "MOST_PAIRS", 10)
        step(impl="native")
        assert served == ["native"]

    @built
    def test_all_implementations_agree(self):
        truth = step(dtype=torch.float64, impl="reference")
        for impl in ("native", "torch", "reference"):
            torch.testing.assert_close(step(impl=impl).total.double(), truth.total, rtol=1e-5, atol=1e-5)

    @built
    @pytest.mark.parametrize(
        ("shape", "dtype", "reason"),
        [
            (SMALL, torch.float64, "float64 inputs"),
            (MANY_CLASSES, torch.float32, f"more than {native.MOST_CLASSES} classes"),
            ((2, 3, 7, 5), torch.float32, "fewer samples than classes"),
        ],
    )
    def test_native_refusal_states_the_reason(self, shape, dtype, reason):
        with pytest.raises(ValueError, match=f"impl='native' cannot serve this call: {reason}.*impl='auto'"):
            step(shape, dtype, impl="native")

    def test_native_refusal_states_that_the_extension_is_missing(self, monkeypatch):
        monkeypatch.setattr(native, "VERSIONS", ())
        with pytest.raises(ValueError, match="not built"):
            step(impl="native")

    @pytest.mark.parametrize("name", ["semantic_log_softmax", "probit_probabilities"])
    def test_functions_without_native_kernel_refuse_native(self, name):
        problem = make_problem(dtype=torch.float32)
        rows = problem.weak_logits, problem.weight, problem.covariance, problem.pseudo_labels
        with pytest.raises(ValueError, match=r"impl='native' cannot serve this call: .*whole steps"):
            getattr(plsp_kernels, name)(*rows, strength=0.1, impl="native")

    @pytest.mark.parametrize("impl", ["auto", "torch", "reference", *(["native"] if native.VERSIONS else [])])
    def test_class_activation_labels_accept_every_implementation(self, impl):
        problem = make_problem(dtype=torch.float32)
        expected = reference.class_activation_labels(problem.weak_logits, problem.candidates)
        found = plsp_kernels.class_activation_labels(problem.weak_logits, problem.candidates, impl=impl)
        assert torch.equal(found, expected)


class TestOperatorsCalledDirectly:
    """Operators called directly bypass the public checks; invalid tensors must still raise."""

    def arguments(self, impl="native"):
        problem = make_problem(*SMALL, dtype=torch.float32)
        tensors = problem.labeled_logits, problem.weak_logits, problem.strong_logits, problem.weight, problem.covariance
        sets = problem.labels, problem.candidates, problem.pseudo_labels, problem.labeled_candidates
        numbers = torch.tensor(0.3, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64), 1.2
        return [*tensors, *sets, problem.class_thresholds, *numbers, True, None, True, True, impl]

    @built
    @pytest.mark.parametrize("position", range(10))
    @pytest.mark.parametrize(
        "damage",
        [lambda t: t[:-1], lambda t: t.cfloat(), lambda t: t[None]],
        ids=["too short", "other dtype", "other rank"],
    )
    def test_upper_bound_rejects_invalid_tensors(self, position, damage):
        arguments = self.arguments()
        torch.ops.plsp.upper_bound(*arguments)
        arguments[position] = damage(arguments[position])
        with pytest.raises((ValueError, TypeError)):
            torch.ops.plsp.upper_bound(*arguments)

    @pytest.mark.parametrize("impl", ["torch", pytest.param("native", marks=built)])
    @pytest.mark.parametrize("position", [5, 7], ids=["labels", "pseudo_labels"])
    @pytest.mark.parametrize("value", [-1, SMALL[2]])
    def test_upper_bound_rejects_out_of_range_classes(self, position, value, impl):
        arguments = self.arguments(impl)
        arguments[position] = torch.full_like(arguments[position], value)
        with pytest.raises(IndexError, match=r"\[0, 7\)"):
            torch.ops.plsp.upper_bound(*arguments)

    @built
    def test_updates_and_labels_reject_invalid_tensors(self):
        covariance, mean, count = torch.zeros(3, 4, 4), torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)
        skipped = count.clone()
        features, labels = torch.ones(2, 4), torch.tensor([0, 2])
        update = torch.ops.plsp.covariance_update
        update(covariance, mean, count, skipped, features, labels, "native")
        for wrong in (
            (covariance[:2], mean, count, skipped, features, labels),
            (covariance, mean.double(), count, skipped, features, labels),
            (covariance, mean, count[:2], skipped, features, labels),
            (covariance, mean, count, skipped[:2], features, labels),
            (covariance, mean, count, skipped, features[:, :3], labels),
            (covariance, mean, count, skipped, features, labels[:1]),
            (covariance, mean, count, skipped, features, labels + 1),
            (covariance.mT, mean, count, skipped, features, labels),
        ):
            with pytest.raises((ValueError, TypeError, IndexError)):
                update(*wrong, "native")
        with pytest.raises(ValueError, match="candidates"):
            torch.ops.plsp.class_activation_labels(features, torch.ones(1, 4, dtype=torch.bool), "native")

    def test_unknown_implementation_is_an_error(self):
        with pytest.raises(ValueError, match="'cuda'"):
            torch.ops.plsp.class_activation_labels(torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), "cuda")

    def test_native_operator_without_the_extension_is_an_error(self, monkeypatch):
        monkeypatch.setattr(native, "VERSIONS", ())
        with pytest.raises(ValueError, match="not built"):
            torch.ops.plsp.upper_bound(*self.arguments())
