"""Kernels on the CPU, and a cache for the compiler that belongs to the test run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def interpreted() -> Iterator[None]:
    """Run the bodies of the kernels, interpreted, for CPU tensors."""
    from tests.support import triton_interpreter

    with triton_interpreter.interpreted():
        yield


@pytest.fixture
def seed(seed: int) -> int:
    """A fresh one, for torch too."""
    torch.manual_seed(seed)
    return seed


@pytest.fixture
def compiler_cache(
    pytestconfig: pytest.Config,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keep what Triton compiles with the other caches of the test run."""
    cache = getattr(pytestconfig, "cache", None)
    folder = cache.mkdir("triton") if cache else tmp_path_factory.getbasetemp() / "triton"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    # Triton 3.9 warns of another default to come where this is not said.
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
