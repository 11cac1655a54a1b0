"""Memory that is mapped read-only, over RDMA: cards get no right that it has not."""

from __future__ import annotations

import mmap
import warnings

import numpy as np
import pytest
import torch

from tests.support.engines import BOTH, new_engine, offer
from transfer import Access

NBYTES = 1 << 16


def test_read_only_memory_is_sent_and_read() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Private: what is shared and read-only no card gets before Linux 6.2, which is an error.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, NBYTES, flags=flags, prot=mmap.PROT_READ)
        weights = torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))
    with (
        new_engine("verbs", devices=("rxe0",)) as one,
        new_engine("verbs", devices=("rxe2",)) as other,
    ):
        one.connect(other.address)
        source, window = one.register(weights), torch.ones(NBYTES, dtype=torch.uint8)
        key = offer(other, other.register(window), one)
        one.write(other.name, source, key, 0, 0, NBYTES, immediate=1).wait()
        other.expect({(one.name, 1): 1}, timeout_s=60.0)
        assert not window.any()
        window.fill_(1)
        back = offer(one, source, other, Access.READ)
        other.read(one.name, other.register(window), back, 0, 0, NBYTES).wait()
        assert not window.any()
        with pytest.raises(ValueError, match="mapped read-only"):
            one.offer(source, to=other.name, access=BOTH)
        with pytest.raises(ValueError, match="mapped read-only"):
            one.read(other.name, source, key, 0, 0, NBYTES)
