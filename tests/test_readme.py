"""The code in README.md runs as shown."""

import re
import runpy
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_first_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for number, block in enumerate(blocks):
        script = tmp_path / f"block{number}.py"
        script.write_text(block, encoding="utf-8")
        runpy.run_path(str(script))
    assert "grad_fn" in capsys.readouterr().out


@pytest.mark.parametrize("target", sorted(set(re.findall(r"^make (\w+)", README, re.MULTILINE))))
def test_make_targets_exist(target: str) -> None:
    makefile = (Path(__file__).parent.parent / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)
