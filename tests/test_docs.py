"""The documentation: every public name has a docstring, every local link resolves, generated pages are up to date.

None of this needs Sphinx; `make docs` builds the site.
"""

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import plsp_kernels

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
PUBLIC = [name for name in plsp_kernels.__all__ if not name.startswith("__")]
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^()\s]+)\)")


def _public_members(public: object) -> list[str]:
    """Methods and properties defined by the class itself, without inherited ones."""
    return [name for name, value in vars(public).items() if not name.startswith("_") and _is_documentable(value)]


def _is_documentable(value: object) -> bool:
    return inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_have_docstrings(name: str) -> None:
    public = getattr(plsp_kernels, name)
    assert inspect.getdoc(public), f"plsp_kernels.{name} has no docstring"
    if inspect.isclass(public):
        missing = [member for member in _public_members(public) if not inspect.getdoc(getattr(public, member))]
        assert not missing, f"no docstring: {', '.join(f'{name}.{member}' for member in missing)}"


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_in_the_reference(name: str) -> None:
    page = (ROOT / "docs" / "api" / "kernels.md").read_text(encoding="utf-8")
    assert re.search(rf":: plsp_kernels\.{name}$", page, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_local_links_resolve(page: Path) -> None:
    broken = [
        target
        for target in _LINK.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))
        if ":" not in target and not _resolves(page, target)
    ]
    assert not broken


def _resolves(page: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    file = page.parent / path if path else page
    return file.exists() and (not anchor or anchor in _anchors(file))


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub, and MyST as configured, give the headings of a page."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_table_of_contents() -> None:
    docs = ROOT / "docs"
    listed = {"index"}
    for page in docs.rglob("*.md"):
        for tree in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            entries = (line.strip() for line in tree.splitlines() if line.strip() and not line.startswith(":"))
            listed |= {(page.parent / entry).relative_to(docs).as_posix() for entry in entries}
    assert {page.relative_to(docs).with_suffix("").as_posix() for page in docs.rglob("*.md")} == listed


def test_command_line_reference_is_up_to_date() -> None:
    found = subprocess.run([sys.executable, "docs/cli_reference.py", "--check"], cwd=ROOT)
    assert found.returncode == 0, "run python docs/cli_reference.py"


@pytest.mark.parametrize("number", range(2))
def test_tutorial_snippets_print_what_is_shown(number: int) -> None:
    text = (ROOT / "docs" / "tutorials" / "own-loop.md").read_text(encoding="utf-8")
    snippet, shown = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, re.DOTALL)[number]
    found = subprocess.run([sys.executable, "-c", snippet], cwd=ROOT, capture_output=True, text=True)
    assert _numbers(found.stdout) == pytest.approx(_numbers(shown), abs=2e-3), found.stderr


def _numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)]


def _refused(call: Callable[[], object]) -> str:
    with pytest.raises((ValueError, TypeError)) as raised:
        call()
    return str(raised.value)


def test_faq_quotes_actual_error_messages() -> None:
    faq = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
    logits, weight, covariance = torch.zeros(2, 10), torch.zeros(10, 8), torch.zeros(10, 8)
    labels, candidates = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 10, dtype=torch.bool)
    loss = partial(plsp_kernels.semantic_cross_entropy, strength=0.0)
    messages = [
        _refused(lambda: loss(logits, weight, covariance, labels.float())),
        _refused(lambda: loss(logits, weight, torch.zeros(10, 16, 16), labels)).split(", got")[0],
        _refused(lambda: plsp_kernels.class_activation_labels(logits, candidates.float())),
        _refused(lambda: plsp_kernels.class_activation_labels(logits, candidates)),
    ]
    assert [message for message in messages if f"**`{message}`**" not in faq] == []


def test_first_tutorial_shows_actual_output() -> None:
    tutorial = (ROOT / "docs" / "tutorials" / "first-run.md").read_text(encoding="utf-8")
    arguments = ["--flip-probability", "2"]
    found = subprocess.run([sys.executable, "-m", "plsp_train", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert f"$ python -m plsp_train {' '.join(arguments)}\n{found.stderr}" in tutorial
    report = (ROOT / "plsp_train" / "console.py").read_text(encoding="utf-8")
    explained = re.findall(r"^- `([\w -]+)`:", tutorial, re.MULTILINE)
    assert explained
    assert [column for column in explained if f'"{column}"' not in report] == [], "columns of the log were renamed"
