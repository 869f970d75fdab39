"""Architecture rules: the direction of imports and the length of argument lists."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MOST_PARAMETERS = 6
# The public API may have more.
PUBLIC = {"plsp_kernels/functional.py", "plsp_kernels/modules.py", "plsp_train/estimator.py"}

# Each path and the modules it must not import.
FORBIDDEN = {
    "plsp_kernels/torch_impl": ("plsp_kernels.native", "plsp_kernels.triton_impl", "plsp_kernels.ops"),
    "plsp_kernels/triton_impl": ("plsp_kernels.native", "plsp_kernels.torch_impl", "plsp_kernels.ops"),
    "plsp_kernels/native": ("plsp_kernels.torch_impl", "plsp_kernels.triton_impl", "plsp_kernels.ops"),
    "plsp_kernels/ops": ("plsp_kernels.functional", "plsp_kernels.modules", "plsp_kernels.reference"),
    "plsp_kernels/reference.py": (
        "plsp_kernels.native",
        "plsp_kernels.ops",
        "plsp_kernels.torch_impl",
        "plsp_kernels.triton_impl",
    ),
    "plsp_kernels": ("plsp_train", "benchmarks"),
    "plsp_train/data": ("plsp_train.engine", "plsp_train.methods", "plsp_train.config"),
    "plsp_train/models": ("plsp_train.engine", "plsp_train.methods", "plsp_train.config", "plsp_train.data"),
    "plsp_train/methods": ("plsp_train.engine", "plsp_train.cli"),
    "plsp_train": ("benchmarks",),
}


def sources(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")) if (ROOT / folder).is_dir() else [ROOT / folder]:
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def is_jit(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in function.decorator_list)


@pytest.mark.parametrize("folder", ["plsp_kernels", "plsp_train", "benchmarks", "examples", "tests"])
def test_argument_lists_stay_short(folder: str) -> None:
    long = []
    for name, tree in sources(folder):
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef) or is_jit(function) or name in PUBLIC:
                continue
            given = function.args
            names = [argument.arg for argument in given.posonlyargs + given.args + given.kwonlyargs]
            own = [argument for argument in names if argument not in ("self", "cls", "ctx")]
            if len(own) > MOST_PARAMETERS:
                long.append(f"{name}: {function.name} has {len(own)}")
    assert not long, "\n".join(long)


@pytest.mark.parametrize("room", FORBIDDEN)
def test_packages_import_only_lower_layers(room: str) -> None:
    wrong = []
    for name, tree in sources(room):
        for node in imports_at_run_time(tree):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else imported_from(node)
            wrong += [f"{name} imports {module}" for module in modules if module.startswith(FORBIDDEN[room])]
    assert not wrong, "\n".join(wrong)


def imports_at_run_time(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """All imports except those under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        yield from imports_at_run_time(node)


def imported_from(node: ast.ImportFrom) -> list[str]:
    return [f"{node.module}.{alias.name}" for alias in node.names]
