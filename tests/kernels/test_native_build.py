"""Build of the C extension: instruction sets, compilers, and failure messages."""

import importlib.machinery
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from test_native import assert_agrees, make_step

from cases import KINDS
from plsp_kernels import native

ROOT = Path(__file__).parents[2]
COMPILERS = ("gcc", "clang")
needs_objdump = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("objdump") is None, reason="needs x86-64 and objdump"
)


def build(folder, **environment):
    """Run setup.py build_ext into the folder."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--force"]
    command += ["--build-lib", str(folder), "--build-temp", str(folder / "temp")]
    options = {"cwd": ROOT, "env": {**os.environ, **environment}, "capture_output": True, "text": True}
    return subprocess.run(command, **options)


def built(folder):
    return sorted(folder.glob("plsp_kernels/native/_kernels*.so"))


@pytest.fixture(scope="module", params=COMPILERS)
def library(request, tmp_path_factory):
    """The extension built by this compiler, without warnings."""
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    folder = tmp_path_factory.mktemp(request.param)
    result = build(folder, CC=request.param, CFLAGS="-Werror", PLSP_REQUIRE_NATIVE="1")
    assert result.returncode == 0, result.stderr
    (path,) = built(folder)
    return path


def fused_multiply_adds(path, function):
    """Count fused multiply-adds in the function, by register width."""
    command = ["objdump", "--disassemble=" + function, "--no-show-raw-insn", str(path)]
    code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers = re.findall(r"\bvfn?m.*%([xyz]mm)", code)
    return {name: registers.count(name) for name in ("xmm", "ymm", "zmm")}


def assert_wide_registers(path):
    """Scalar code contains fused multiply-adds too, so require more than a few."""
    avx2, avx512 = (fused_multiply_adds(path, f"upper_bound_{version}") for version in ("avx2", "avx512"))
    assert avx2["ymm"] > 15
    assert avx2["zmm"] == 0
    assert avx512["zmm"] > 15


@needs_objdump
@pytest.mark.skipif(not native.VERSIONS, reason="not built")
def test_installed_versions_use_wide_registers():
    assert_wide_registers(native._kernels.__file__)


@needs_objdump
def test_every_compiler_uses_wide_registers(library):
    assert_wide_registers(library)
    assert not any(fused_multiply_adds(library, "upper_bound_baseline").values())


def load(path):
    loader = importlib.machinery.ExtensionFileLoader("_kernels", str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("_kernels", loader))
    loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", range(len(native.VERSIONS)))
def test_every_compiler_gives_accurate_results(library, index, kind, monkeypatch):
    monkeypatch.setattr(native, "_kernels", load(library))
    for num_classes, num_features in [(2, 4), (10, 84), (17, 13)]:
        step = make_step(13, 20, num_classes, num_features, kind=kind, again=True)
        assert_agrees(step, native.VERSIONS[index])


def test_build_without_a_compiler_succeeds_with_a_one_line_notice(tmp_path):
    result = build(tmp_path, CC="/nowhere/cc", PLSP_REQUIRE_NATIVE="0")
    assert result.returncode == 0
    assert not built(tmp_path)
    assert result.stdout.splitlines() == ["plsp: no C compiler found; the ATen implementation will serve alone"]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
class TestCodeThatDoesNotCompile:
    flags = "-include /nowhere/missing.h"

    def test_is_a_warning_that_names_the_reason(self, tmp_path):
        result = build(tmp_path, CC="cc", CFLAGS=self.flags, PLSP_REQUIRE_NATIVE="0")
        assert result.returncode == 0
        assert not built(tmp_path)
        assert "plsp_kernels.native._kernels could not be built" in result.stderr
        assert "/nowhere/missing.h" in result.stderr

    def test_is_an_error_if_the_extension_is_required(self, tmp_path):
        assert build(tmp_path, CC="cc", CFLAGS=self.flags, PLSP_REQUIRE_NATIVE="1").returncode != 0


@pytest.mark.parametrize(("compiler", "tag"), [("false", "py3-none-any"), ("gcc", "cp310-abi3")])
def test_wheel_is_tagged_by_whether_it_holds_the_extension(tmp_path, compiler, tag):
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    pytest.importorskip("setuptools.command.bdist_wheel")
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(tmp_path / "build")]
    command += ["bdist_wheel", "--dist-dir", str(tmp_path), "--bdist-dir", str(tmp_path / "wheel")]
    environment = {**os.environ, "CC": compiler, "PLSP_REQUIRE_NATIVE": "0"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert tag in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith(".so") for name in names) == (compiler == "gcc")
    assert {"plsp_kernels/__init__.py", "plsp_train/report/style.css"} <= set(names)
    assert ("lacks the C extension" in result.stdout) == (compiler == "false")
