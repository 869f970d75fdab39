"""The optional C extensions; all else is in pyproject.toml.

Without them the ATen implementation serves alone, so a build that fails only prints why, which pip shows with `-v`. Set
PLSP_REQUIRE_NATIVE=1 to make it an error, as a build of wheels should.
"""

import os
import shutil
from glob import glob

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError, PlatformError


class OptionalBuild(build_ext):
    compiler_missed = False

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except (BaseError, CCompilerError) as reason:
            if not ext.optional:
                raise
            command = getattr(self.compiler, "compiler_so", None)
            if isinstance(reason, PlatformError) or (command and shutil.which(command[0]) is None):
                if not self.compiler_missed:
                    print("plsp: no C compiler found; the ATen implementation will serve alone")
                self.compiler_missed = True
            else:
                self.warn(
                    f"{ext.name} could not be built, and the ATen implementation will serve alone: {reason} "
                    "(see the compiler's messages above; PLSP_REQUIRE_NATIVE=1 makes this an error)"
                )


class TaggedWheel(bdist_wheel):
    """Tag a wheel without extensions as pure Python: it runs anywhere."""

    def run(self) -> None:
        self.run_command("build")
        if not glob(os.path.join(self.get_finalized_command("build").build_lib, "**", "*.abi3.so"), recursive=True):
            print("plsp: this wheel lacks the C extensions and is tagged as pure Python")
            self.root_is_pure, self.distribution.ext_modules = True, []
        super().run()


def native(name: str, folder: str) -> Extension:
    """The extension of the C files in a folder. Headers in plsp_kernels/native are common to all."""
    return Extension(
        name,
        sources=sorted(glob(f"{folder}/*.c")),
        include_dirs=["plsp_kernels/native"],
        depends=sorted({*glob("plsp_kernels/native/*.h"), *glob(f"{folder}/*.h")}),
        extra_compile_args=[
            "-std=c11",
            "-O3",
            "-ffp-contract=fast",  # a * b + c as one instruction
            "-fno-math-errno",
            "-Wall",
            "-Wextra",
            "-Wno-psabi",  # vectors are passed to inlined functions only
        ],
        define_macros=[("Py_LIMITED_API", "0x030A0000")],
        py_limited_api=True,
        optional=os.environ.get("PLSP_REQUIRE_NATIVE", "0") in ("", "0"),
    )


setup(
    cmdclass={"build_ext": OptionalBuild, "bdist_wheel": TaggedWheel},
    ext_modules=[
        native("plsp_kernels.native._kernels", "plsp_kernels/native"),
        native("plsp_train.models.native._stages", "plsp_train/models/native"),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
