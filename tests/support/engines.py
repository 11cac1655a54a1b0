"""Transfer engines for tests: pairs in one process, names, and descriptors that are counted."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from typing import Any

from configs.schema import TransferBackend, TransferConfig
from tests.support.certificates import member_tls
from transfer import Access, Region, RegionKey, TransferEngine

SECRET = b"only the members of this cluster know it"
BACKENDS = (TransferBackend.SHARED_MEMORY, TransferBackend.TCP)
# As a backend, tcp with encrypted connections.
TLS = "tls"
BOTH = Access.READ | Access.WRITE
PATIENT_S = 30.0


def new_name() -> str:
    return secrets.token_hex(8)


def new_engine(backend: str = "auto", *, name: str | None = None, **options: Any) -> TransferEngine:
    secret = options.pop("secret", SECRET)
    # A machine that stands still for some seconds costs no test its connections.
    options = {"handshake_timeout_s": PATIENT_S, "resume_timeout_s": PATIENT_S, **options}
    if backend == TLS:
        backend, options = "tcp", {"tls": member_tls(), **options}
    config = TransferConfig(backend=TransferBackend(backend), **options)
    return TransferEngine(config, name=name or new_name(), secret=secret)


@contextlib.contextmanager
def engine_pair(backend: str = "auto", **options: Any) -> Iterator[tuple[TransferEngine, Any]]:
    """Two connected engines of this process."""
    with new_engine(backend, **options) as first, new_engine(backend, **options) as second:
        first.connect(second.address)
        yield first, second


def offer(owner: TransferEngine, region: Region, to: TransferEngine, access: Access = BOTH,
          **window: int) -> RegionKey:  # fmt: skip
    """Offer and send the key through its bytes, as a real user does."""
    key = owner.offer(region, to=to.name, access=access, **window)
    return RegionKey.decode(key.encode())


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
