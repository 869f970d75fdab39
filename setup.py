from setuptools import Extension, setup

NATIVE = "plsp_kernels/native"

setup(
    ext_modules=[
        Extension(
            "plsp_kernels.native._kernels",
            sources=[f"{NATIVE}/{name}.c" for name in ("module", "baseline", "avx2", "avx512", "class_activation")],
            depends=[f"{NATIVE}/{name}.h" for name in ("native", "one_pass", "class_gram", "lanes")],
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
