"""The packages' public names: each can be had, and the light ones without what is heavy."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

PACKAGES = ("transfer", "dispatch", "kvstore", "elastic", "moe_runtime", "configs")
ERRORS = (
    "transfer.errors",
    "dispatch.errors",
    "kvstore.errors",
    "elastic.errors",
    "moe_runtime.errors",
    "moe_runtime.front.errors",
    "moe_runtime.bench.errors",
)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_resolves(package: str) -> None:
    module = importlib.import_module(package)
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        found = getattr(module, name)
        if isinstance(found, type):
            assert found.__name__ == name


@pytest.mark.parametrize("package", PACKAGES)
def test_an_unknown_name_is_an_attribute_error(package: str) -> None:
    module = importlib.import_module(package)
    with pytest.raises(AttributeError, match=f"'{package}'.*'Nothing'"):
        _ = module.Nothing


@pytest.mark.parametrize("module", ERRORS)
def test_errors_need_no_tensors_and_no_sockets(module: str) -> None:
    program = (
        f"import sys, {module}\n"
        "print(sorted({'torch', 'numpy', 'zmq', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"
