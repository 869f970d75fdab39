"""User errors: each message names the argument, what it got and what it expects."""

import os
import subprocess
import sys

import pytest
import torch

import plsp_kernels
from cases import KINDS, STRENGTH, make_problem
from plsp_kernels import CurriculumThreshold, SemanticCovariance, SemanticUpperBoundLoss, dispatch

L, D, BL, BU = 7, 19, 3, 5


def problem_arguments(kind="full"):
    problem = make_problem(BL, BU, L, D, dtype=torch.float32, kind=kind)
    return {
        "labeled_logits": problem.labeled_logits,
        "weak_logits": problem.weak_logits,
        "strong_logits": problem.strong_logits,
        "weight": problem.weight,
        "covariance": problem.covariance,
        "labels": problem.labels,
        "candidates": problem.candidates,
        "strength": STRENGTH,
        "thresholds": 0.5,
        "pseudo_labels": problem.pseudo_labels,
        "labeled_candidates": problem.labeled_candidates,
    }


def sample_arguments(name):
    problem = make_problem(BL, BU, L, D, dtype=torch.float32)
    return {
        "logits": problem.weak_logits,
        "weight": problem.weight,
        "covariance": problem.covariance,
        name: problem.pseudo_labels,
        "strength": STRENGTH,
    }


def form_arguments():
    problem = make_problem(BL, BU, L, D, dtype=torch.float32)
    return {"weight": problem.weight, "covariance": problem.covariance, "classes": problem.pseudo_labels}


def activation_arguments():
    problem = make_problem(BL, BU, L, D, dtype=torch.float32)
    return {"logits": problem.weak_logits, "candidates": problem.candidates}


FUNCTIONS = {
    "semantic_upper_bound_loss": (plsp_kernels.semantic_upper_bound_loss, problem_arguments),
    "semantic_log_softmax": (plsp_kernels.semantic_log_softmax, lambda: sample_arguments("classes")),
    "semantic_cross_entropy": (plsp_kernels.semantic_cross_entropy, lambda: sample_arguments("labels")),
    "probit_probabilities": (plsp_kernels.probit_probabilities, lambda: sample_arguments("classes")),
    "pairwise_quadratic_form": (plsp_kernels.pairwise_quadratic_form, form_arguments),
    "class_activation_labels": (plsp_kernels.class_activation_labels, activation_arguments),
}


LOGITS = ("labeled_logits", "weak_logits", "strong_logits", "logits")
SETS = ("candidates", "labeled_candidates")
NUMBERS = ("labels", "classes", "pseudo_labels")
FLOATS = (*LOGITS, "weight", "covariance")
SAMPLES = ("labels", "pseudo_labels", "candidates", "labeled_candidates", "strong_logits")


def replaced(row, value):
    def change(tensor):
        tensor = tensor.clone()
        tensor[row] = value
        return tensor

    return change


# arguments; description; change; exception type; what the message must quote
BREAKS = [
    ((*FLOATS, *SETS, *NUMBERS), "list", lambda t: t.tolist(), TypeError, "list"),
    ((*FLOATS, *SETS, *NUMBERS), "extra dimension", lambda t: t[None], ValueError, r"\(1, "),
    ((*LOGITS, *SETS, "weight"), "missing dimension", lambda t: t[0], ValueError, r"\((7|19),\)"),
    (("covariance",), "missing dimension", lambda t: t[0], ValueError, r"\(19, 19\)"),
    (NUMBERS, "column", lambda t: t[:, None], ValueError, r", 1\)"),
    ((*LOGITS[1:3], *SETS), "a class too many", lambda t: torch.cat([t, t[:, :1]], 1), ValueError, "8"),
    (("weight",), "a class too few", lambda t: t[:-1], ValueError, "6"),
    (("covariance",), "a class too few", lambda t: t[:-1], ValueError, r"\(6, 19, 19\)"),
    (("covariance",), "a feature too many", lambda t: torch.zeros(L, D + 1, D + 1), ValueError, r"\(7, 20, 20\)"),
    (("covariance",), "not square", lambda t: t[:, :-1], ValueError, r"\(7, 18, 19\)"),
    (("covariance",), "diagonal of other size", lambda t: torch.zeros(L, D - 1), ValueError, r"\(7, 18\)"),
    (SAMPLES, "a sample too few", lambda t: t[:-1], ValueError, r"\((2|4),"),
    (FLOATS, "integers", lambda t: t.long(), TypeError, "int64"),
    (FLOATS, "complex", lambda t: t.to(torch.complex64), TypeError, "complex64"),
    (NUMBERS, "booleans", lambda t: t.bool(), TypeError, "bool"),
    (NUMBERS, "float", lambda t: t.float(), TypeError, "float32"),
    (SETS, "integers", lambda t: t.long(), TypeError, "int64"),
    (SETS, "floats", lambda t: t.float(), TypeError, "float32"),
    ((*LOGITS[:3], "covariance", *SETS, *NUMBERS), "other device", lambda t: t.to("meta"), ValueError, "meta"),
    (NUMBERS, "negative", replaced(1, -1), ValueError, "-1"),
    (NUMBERS, "too large", replaced(2, L), ValueError, "7"),
    (SETS, "empty row", replaced(2, False), ValueError, "row 2"),
    (("strength", "beta"), "negative", lambda _: -0.5, ValueError, "-0.5"),
    (("beta",), "zero", lambda _: 0.0, ValueError, "0.0"),
    (("strength", "beta", "ss_weight"), "nan", lambda _: float("nan"), ValueError, "nan"),
    (("strength", "beta", "ss_weight"), "inf", lambda _: float("inf"), ValueError, "inf"),
    (("strength", "beta", "ss_weight", "thresholds"), "text", lambda _: "0.5", TypeError, "str"),
    (("strength", "beta", "ss_weight", "thresholds"), "none", lambda _: None, TypeError, "NoneType"),
    (("thresholds",), "negative", lambda _: -0.25, ValueError, "-0.25"),
    (("thresholds",), "above one", lambda _: 1.5, ValueError, "1.5"),
    (("thresholds",), "nan", lambda _: float("nan"), ValueError, "nan"),
    (("thresholds",), "negative entry", lambda _: torch.linspace(-0.25, 1, L), ValueError, "-0.25"),
    (("thresholds",), "entry above one", lambda _: torch.linspace(0, 1.5, L), ValueError, "1.5"),
    (("thresholds",), "nan entry", lambda _: torch.full((L,), torch.nan), ValueError, "nan"),
    (("thresholds",), "other size", lambda _: torch.zeros(L + 1), ValueError, r"\(8,\)"),
    (("thresholds",), "integers", lambda _: torch.zeros(L, dtype=torch.int64), TypeError, "int64"),
    (("thresholds",), "other device", lambda _: torch.zeros(L, device="meta"), ValueError, "meta"),
    (("strength", "ss_weight"), "vector", lambda _: torch.zeros(1), ValueError, r"\(1,\)"),
    (("strength", "ss_weight", "thresholds"), "integer tensor", lambda _: torch.tensor(1), TypeError, "int64"),
    (("strength", "ss_weight", "thresholds"), "elsewhere", lambda _: torch.ones((), device="meta"), ValueError, "meta"),
    (("strength", "ss_weight", "thresholds"), "nan tensor", lambda _: torch.tensor(torch.nan), ValueError, "nan"),
    (("strength", "thresholds"), "negative tensor", lambda _: torch.tensor(-0.5), ValueError, "-0.5"),
    (("impl",), "unknown", lambda _: "cuda", ValueError, "'cuda'"),
    (("impl",), "none", lambda _: None, ValueError, "None"),
    (("reduction",), "unknown", lambda _: "average", ValueError, "'average'"),
    (("class_weight",), "other size", lambda _: torch.ones(L + 1), ValueError, r"\(8,\)"),
    (("class_weight",), "integers", lambda _: torch.ones(L, dtype=torch.int64), TypeError, "int64"),
    (("class_weight",), "list", lambda _: [1.0] * L, TypeError, "list"),
    (("class_weight",), "other device", lambda _: torch.ones(L, device="meta"), ValueError, "meta"),
    (("label_smoothing",), "above one", lambda _: 1.5, ValueError, "1.5"),
    (("label_smoothing",), "negative", lambda _: -0.1, ValueError, "-0.1"),
    (("label_smoothing",), "text", lambda _: "0.1", TypeError, "str"),
    (("ignore_index",), "float", lambda _: 1.0, TypeError, "float"),
]  # fmt: skip

DEFAULTS = {
    "semantic_upper_bound_loss": {"beta": 1.0, "ss_weight": 1.0, "impl": "torch"},
    "semantic_log_softmax": {"impl": "torch"},
    "semantic_cross_entropy": {
        "impl": "torch",
        "reduction": "mean",
        "class_weight": None,
        "label_smoothing": 0.0,
        "ignore_index": -100,
    },
    "probit_probabilities": {"beta": 1.0, "impl": "torch"},
    "pairwise_quadratic_form": {"impl": "torch"},
    "class_activation_labels": {},
}


def arguments_of(function):
    return {**FUNCTIONS[function][1](), **DEFAULTS[function]}


CASES = [
    pytest.param(function, argument, change, kind, seen, id=f"{function}-{argument}-{label}")
    for names, label, change, kind, seen in BREAKS
    for function in FUNCTIONS
    for argument in names
    if argument in arguments_of(function)
]


@pytest.mark.parametrize(("function", "argument", "change", "kind", "seen"), CASES)
def test_error_names_the_invalid_argument(function, argument, change, kind, seen):
    call, _ = FUNCTIONS[function]
    arguments = arguments_of(function)
    arguments[argument] = change(arguments[argument])
    # If sizes of two arguments disagree, the message may name either.
    blamed = {
        "weight": "weight|labeled_logits|covariance",
        "logits": "logits|candidates|labels|classes",
        "weak_logits": "weak_logits|strong_logits|candidates",
    }.get(argument, argument)
    with pytest.raises(kind, match=rf"\b({blamed})\b.*{seen}"):
        call(**arguments)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_unmodified_arguments_are_valid(function):
    """Guards the test above."""
    FUNCTIONS[function][0](**arguments_of(function))


@pytest.mark.parametrize("function", [name for name in FUNCTIONS if name != "class_activation_labels"])
def test_weight_on_another_device_is_an_error(function):
    arguments = arguments_of(function)
    arguments["weight"] = arguments["weight"].to("meta")
    with pytest.raises(ValueError, match=r"must be on meta.*got cpu"):
        FUNCTIONS[function][0](**arguments)


def test_candidates_on_another_device_are_an_error():
    with pytest.raises(ValueError, match=r"candidates must be on cpu.*got meta"):
        plsp_kernels.class_activation_labels(torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool, device="meta"))


def test_single_class_is_an_error():
    with pytest.raises(ValueError, match=r"weight must have at least 2 rows.*got 1"):
        plsp_kernels.semantic_log_softmax(
            torch.zeros(2, 1), torch.zeros(1, 3), torch.zeros(1, 3), torch.zeros(2, dtype=torch.int64), strength=0.1
        )


@pytest.mark.parametrize("zero", [0, 0.0, False])
def test_zero_strength_is_valid_in_any_number_type(zero):
    arguments = arguments_of("semantic_log_softmax") | {"strength": zero}
    assert plsp_kernels.semantic_log_softmax(**arguments).isfinite().all()


@pytest.mark.parametrize("function", [name for name in FUNCTIONS if name != "class_activation_labels"])
def test_error_for_triton_on_cpu_suggests_the_interpreter(function, monkeypatch):
    pytest.importorskip("triton", minversion="3.5")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"impl='triton'.*cpu.*TRITON_INTERPRET=1"):
        FUNCTIONS[function][0](**(arguments_of(function) | {"impl": "triton"}))


def test_missing_triton_is_an_error(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(dispatch, "_TRITON_REFUSAL", dispatch._find_triton())
    with pytest.raises(ValueError, match=r"impl='triton'.*not installed.*impl='auto'"):
        plsp_kernels.semantic_log_softmax(**(arguments_of("semantic_log_softmax") | {"impl": "triton"}))


def test_values_are_checked_on_all_devices_only_on_request():
    """PLSP_CHECK_VALUES is read at import, hence the subprocesses. The meta device stands in for a GPU."""
    code = (
        "import torch; from plsp_kernels import checks;"
        "print(checks.looks_at_values(torch.zeros(1)), checks.looks_at_values(torch.zeros(1, device='meta')))"
    )
    for value, expected in (("1", "True True"), ("0", "True False"), ("", "True False")):
        environment = {**os.environ, "PLSP_CHECK_VALUES": value}
        output = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert output.stdout.strip() == expected, value


class TestModules:
    @pytest.mark.parametrize(
        ("make", "kind", "message"),
        [
            (lambda: SemanticCovariance(1, 4), ValueError, r"num_classes .*at least 2.*got 1"),
            (lambda: SemanticCovariance(2.0, 4), (TypeError, ValueError), r"num_classes .*got 2\.0"),
            (lambda: SemanticCovariance(3, 0), ValueError, r"num_features .*at least 1.*got 0"),
            (lambda: SemanticCovariance(3, 4, "banded"), ValueError, r"kind .*'full', 'diagonal'.*'banded'"),
            (lambda: CurriculumThreshold(0, 4), ValueError, r"num_instances .*at least 1.*got 0"),
            (lambda: CurriculumThreshold(5, 1), ValueError, r"num_classes .*at least 2.*got 1"),
            (lambda: CurriculumThreshold(5, 4, 1.5), ValueError, r"threshold .*\[0, 1\].*1\.5"),
            (lambda: CurriculumThreshold(5, 4, -0.5), ValueError, r"threshold .*\[0, 1\].*-0\.5"),
            (lambda: CurriculumThreshold(5, 4, float("nan")), ValueError, r"threshold .*nan"),
            (lambda: CurriculumThreshold(5, 4, "high"), TypeError, r"threshold .*str"),
            (lambda: CurriculumThreshold(5, 4, mapping="cubic"), ValueError, r"mapping .*'linear', 'convex'.*'cubic'"),
            (lambda: SemanticUpperBoundLoss(5, 4, 3, covariance="banded"), ValueError, r"'full', 'diagonal'.*'banded'"),
            (lambda: SemanticUpperBoundLoss(5, 4, 3, mapping="cubic"), ValueError, r"mapping .*'cubic'"),
            (lambda: SemanticUpperBoundLoss(5, 4, 3, threshold=2), ValueError, r"threshold .*2"),
            (lambda: SemanticUpperBoundLoss(5, 4, 3, beta=-1.0), ValueError, r"beta .*-1"),
        ],
    )
    def test_error_names_the_invalid_constructor_argument(self, make, kind, message):
        with pytest.raises(kind, match=message):
            make()

    @pytest.mark.parametrize("covariance", KINDS)
    @pytest.mark.parametrize(
        ("features", "labels", "kind", "message"),
        [
            (torch.zeros(3, 5), torch.zeros(3).long(), ValueError, r"features .*\(N, 4\).*\(3, 5\)"),
            (torch.zeros(4), torch.zeros(1).long(), ValueError, r"features .*\(4,\)"),
            (torch.zeros(3, 4).long(), torch.zeros(3).long(), TypeError, r"features .*int64"),
            ([[0.0] * 4], torch.zeros(1).long(), TypeError, r"features .*list"),
            (torch.zeros(3, 4, device="meta"), torch.zeros(3).long(), ValueError, r"features .*cpu.*meta"),
            (torch.zeros(3, 4), torch.zeros(2).long(), ValueError, r"labels .*\(3,\).*\(2,\)"),
            (torch.zeros(3, 4), torch.zeros(3), TypeError, r"labels .*integers.*float32"),
            (torch.zeros(3, 4), torch.tensor([0, 1, 6]), ValueError, r"labels .*\[0, 6\).*6"),
            (torch.zeros(3, 4), torch.tensor([0, 1, -1]), ValueError, r"labels .*-1"),
        ],
    )
    def test_invalid_covariance_update_raises_and_changes_nothing(self, covariance, features, labels, kind, message):
        statistics = SemanticCovariance(6, 4, covariance)
        with pytest.raises(kind, match=message):
            statistics.update(features, labels)
        assert not any(buffer.any() for buffer in statistics.buffers())

    GOOD = (torch.tensor([0, 1]), torch.tensor([0, 1]), torch.tensor([True, True]))

    @pytest.mark.parametrize(
        ("place", "value", "kind", "message"),
        [
            (0, torch.tensor([0, 10]), ValueError, r"index .*\[0, 10\).*10"),
            (0, torch.tensor([-1, 0]), ValueError, r"index .*-1"),
            (0, torch.tensor([0]), ValueError, r"index .*\(2,\).*\(1,\)"),
            (0, torch.tensor([0.0, 1.0]), TypeError, r"index .*float32"),
            (1, torch.tensor([0, 4]), ValueError, r"prediction .*\[0, 4\).*4"),
            (1, torch.tensor([[0, 1]]), ValueError, r"prediction .*\(1, 2\)"),
            (1, torch.tensor([0, 1]).bool(), TypeError, r"prediction .*bool"),
            (2, torch.tensor([1, 0]), TypeError, r"selected .*int64"),
            (2, torch.tensor([True]), ValueError, r"selected .*\(1,\)"),
            (2, torch.tensor([True, True], device="meta"), ValueError, r"selected .*cpu.*meta"),
        ],
    )
    def test_invalid_curriculum_update_raises_and_changes_nothing(self, place, value, kind, message):
        curriculum = CurriculumThreshold(10, 4)
        arguments = list(self.GOOD)
        arguments[place] = value
        with pytest.raises(kind, match=message):
            curriculum.update(*arguments)
        assert not curriculum.thresholds.any()
        curriculum.update(*self.GOOD)
        assert curriculum.thresholds.any()
