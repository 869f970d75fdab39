"""`import plsp_kernels` stays light. Each case runs in a subprocess, since imports cannot be undone."""

import os
import subprocess
import sys

import pytest

OPTIONAL = ("triton", "torchvision", "sklearn", "scipy", "matplotlib", "pandas", "tqdm", "plsp_train")

# a training step in miniature, as a script
STEP = """
import torch, plsp_kernels
logits = [torch.randn(n, 4, requires_grad=True) for n in (3, 5, 5)]
weight, features = torch.randn(4, 6, requires_grad=True), torch.randn(3, 6)
criterion = plsp_kernels.SemanticUpperBoundLoss(10, 4, 6)
loss = criterion(*logits, weight, torch.tensor([0, 1, 1]), torch.ones(5, 4, dtype=torch.bool),
                 labeled_features=features, index=torch.arange(5), strength=0.1)
loss.total.backward()
assert weight.grad.isfinite().all()
"""


def run(code, **environment):
    # outside the repository, with no Triton variables set
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TRITON")}
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    clean["PYTHONPATH"] = os.pathsep.join(filter(None, [root, clean.get("PYTHONPATH")]))
    clean["OMP_NUM_THREADS"] = "1"
    result = subprocess.run(
        [sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def blocking(*names):
    """Code after which these modules can be neither imported nor found, as if not installed."""
    return f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name.partition(".")[0] in {names!r} else find_spec(name, *a)
sys.meta_path.insert(0, Block())
"""


@pytest.mark.parametrize("missing", [("triton",), OPTIONAL], ids=["triton", "everything optional"])
def test_training_step_runs_without_optional_packages(missing):
    run(blocking(*missing) + STEP)


def test_training_step_runs_without_the_extension():
    without = "import sys; sys.modules['plsp_kernels.native._kernels'] = None"
    assert run(f"{without}\n{STEP}\nfrom plsp_kernels import native; print(native.VERSIONS)") == "()"


def test_blocked_modules_cannot_be_imported():
    """Guards the test above."""
    code = blocking(*OPTIONAL) + "\nfor name in %r:\n    try: __import__(name)\n    except ImportError: print(name)"
    assert run(code % (OPTIONAL,)).split() == list(OPTIONAL)


def test_explicit_triton_without_the_package_is_an_error():
    code = """
import torch, plsp_kernels
try:
    plsp_kernels.pairwise_quadratic_form(torch.zeros(2, 3), torch.zeros(2, 3), impl="triton")
except ValueError as error:
    print(error)
"""
    message = run(blocking("triton") + code)
    assert "triton" in message
    assert "not installed" in message


def test_import_loads_no_optional_packages():
    code = "import torch, sys; before = set(sys.modules); import plsp_kernels; print(*(set(sys.modules) - before))"
    imported = {name.partition(".")[0] for name in run(code).split()}
    assert "plsp_kernels" in imported
    assert not imported & set(OPTIONAL)


def test_closed_form_never_imports_triton():
    assert run(STEP + "\nimport sys; print('triton' in sys.modules)") == "False"


def test_import_sets_no_environment():
    code = "import os, torch; before = dict(os.environ); import plsp_kernels; print(dict(os.environ) == before)"
    assert run(code) == "True"


def test_import_does_not_change_torch_settings():
    code = """
import torch
def settings():
    return (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), torch.initial_seed(),
            torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision())
torch.manual_seed(7)
before, state = settings(), torch.get_rng_state()
import plsp_kernels
print(settings() == before and torch.equal(torch.get_rng_state(), state))
"""
    assert run(code) == "True"


def test_public_names_are_stable():
    import plsp_kernels

    assert set(plsp_kernels.__all__) == {
        "CurriculumThreshold",
        "SemanticCovariance",
        "SemanticCrossEntropyLoss",
        "SemanticLoss",
        "SemanticUpperBoundLoss",
        "__version__",
        "class_activation_labels",
        "pairwise_quadratic_form",
        "probit_probabilities",
        "semantic_cross_entropy",
        "semantic_log_softmax",
        "semantic_upper_bound_loss",
    }
    assert all(hasattr(plsp_kernels, name) for name in plsp_kernels.__all__)
