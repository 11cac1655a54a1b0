"""The compiled parts of the packages; everything else about the build is in pyproject.toml."""

from glob import glob

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "transfer._native",
            ["transfer/native.c"],
            depends=sorted(glob("transfer/compiled/*.c")),
            extra_compile_args=["-O2", "-Wall", "-Wextra"],
            optional=True,  # without a compiler the package works, more slowly
        ),
        Extension(
            "dispatch._native",
            ["dispatch/native.c"],
            # Each product and each sum is rounded on its own, whatever the processor could fuse.
            extra_compile_args=["-O3", "-ffp-contract=off", "-Wall", "-Wextra"],
            optional=True,
        ),
        Extension(
            "kvstore._native",
            ["kvstore/native.c"],
            depends=sorted(glob("kvstore/compiled/*.c")),
            extra_compile_args=["-O2", "-Wall", "-Wextra"],
            optional=True,
        ),
        Extension(
            "kvstore._rows",
            ["kvstore/rows.c"],
            depends=sorted(glob("kvstore/compiled/*.c")),
            extra_compile_args=["-O2", "-Wall", "-Wextra"],
            optional=True,
        ),
        Extension(
            "moe_runtime.models._tiles",
            ["moe_runtime/models/tiles.c"],
            extra_compile_args=["-O3", "-ffp-contract=off", "-Wall", "-Wextra"],
            optional=True,
        ),
    ]
)
