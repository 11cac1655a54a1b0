"""Memory whose file is closed as a peer asks for it."""

from __future__ import annotations

import os

import pytest

from tests.support.engines import engine_pair, offer
from transfer import TransferError, allocate

SOON_S = 60.0
NBYTES = 4096


def test_what_was_closed_just_then_is_unknown_and_ends_nothing(monkeypatch):
    plain, refused = os.open, []

    def closed(path, flags, *rest, **options):
        if str(path).startswith("/proc/self/fd/") and not refused:
            refused.append(path)
            raise FileNotFoundError(2, "no such file", path)
        return plain(path, flags, *rest, **options)

    with engine_pair("shared_memory") as (a, b):
        source = a.register(allocate(NBYTES))
        source.array[:] = 7
        gone, there = (offer(b, b.register(allocate(NBYTES)), a) for _ in range(2))
        monkeypatch.setattr(os, "open", closed)
        with pytest.raises(TransferError):
            a.write(b.name, source, gone, 0, 0, NBYTES).wait(SOON_S)
        assert refused, "the fault happened"
        a.write(b.name, source, there, 0, 0, NBYTES).wait(SOON_S)
