"""Where these tests run: on RDMA devices, in CI those of a virtual machine (`make test-rdma`)."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.fabric import repair
from transfer.backends.verbs import unavailable

# In the virtual machine a second of the host's is tens of them.
TIMEOUT_S = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip with the reason where there is no RDMA; fail there if it was required."""
    reason = unavailable()
    if reason is None and len(device_names()) < 4:
        reason = f"needs four RDMA devices, there are {len(device_names())}"
    required = bool(os.environ.get("REQUIRE_RDMA"))
    for item in items:
        if "rdma" not in item.path.parts:
            continue
        item.add_marker(pytest.mark.timeout(TIMEOUT_S))
        if reason is not None and not required:
            item.add_marker(pytest.mark.skip(reason=reason))


def device_names() -> list[str]:
    from transfer.backends.verbs.device import device_names as found

    return found()


@pytest.fixture(autouse=True, scope="session")
def rdma_is_there() -> None:
    reason = unavailable()
    if reason is not None:
        pytest.fail(f"RDMA was required: {reason}")


@pytest.fixture
def fabric() -> Iterator[None]:
    """Put every cable back, and take off what slows a rail."""
    if os.environ.get("RDMA_VM") != "1":
        pytest.skip("cuts cables of the virtual machine's switch")
    yield
    repair()
