from glob import glob

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "plsp_kernels.native._kernels",
            sources=sorted(glob("plsp_kernels/native/*.c")),
            depends=sorted(glob("plsp_kernels/native/*.h")),
            extra_compile_args=[
                "-std=c11",
                "-O3",
                "-ffp-contract=fast",  # a * b + c as one instruction
                "-fno-math-errno",
                "-Wno-psabi",  # vectors are passed to inlined functions only
            ],
            define_macros=[("Py_LIMITED_API", "0x030A0000")],
            py_limited_api=True,
            optional=True,  # where it cannot be compiled, the closed form in PyTorch serves alone
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
