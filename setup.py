"""The compiled part of the package; everything else about the build is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "transfer._native",
            ["transfer/native.c"],
            extra_compile_args=["-O2", "-Wall", "-Wextra"],
            optional=True,  # without a compiler the package works, more slowly
        )
    ]
)
