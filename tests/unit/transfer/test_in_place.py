"""Bytes that are assembled in a peer's memory and then announced."""

from __future__ import annotations

import pytest

from configs.schema import TransferBackend, TransferConfig
from transfer import Access, PeerLost, TransferEngine, allocate


@pytest.fixture(params=[TransferBackend.SHARED_MEMORY, TransferBackend.TCP])
def engines(request):
    made = [
        TransferEngine(TransferConfig(backend=request.param), name=name, secret=b"test")
        for name in ("one", "two")
    ]
    with made[0], made[1]:
        made[0].connect(made[1].address, timeout_s=20)
        yield made


def test_what_is_mapped_is_written_in_place(engines):
    one, two = engines
    memory, ours = allocate(8192), allocate(4096)
    key = two.offer(two.register(memory), to="one", access=Access.WRITE)
    readable = two.offer(two.register(memory), to="one", access=Access.READ)
    region = one.register(ours)
    assert one.in_place("two", key) is None, "nothing has mapped it yet"
    one.write("two", region, key, 0, 0, 8, immediate=1).wait(20)
    two.expect({("one", 1): 1}, timeout_s=20)
    mapped = one.in_place("two", key)
    if one.peers()[0].backend != "shared_memory":
        assert mapped is None
        return
    before = one.statistics().backends["shared_memory"]
    mapped.array[100:105] = 7
    assert mapped.announce(5, 2).nbytes == 5
    two.expect({("one", 2): 1}, timeout_s=20)
    assert memory.tensor[100:105].tolist() == [7] * 5
    after = one.statistics().backends["shared_memory"]
    assert after.bytes_written - before.bytes_written == 5
    assert after.immediates - before.immediates == 1
    one.read("two", region, readable, 0, 0, 8).wait(20)
    assert one.in_place("two", readable) is None, "for reading only"
    assert one.in_place("three", key) is None
    one.disconnect("two", reason="lost")
    assert one.in_place("two", key) is None
    with pytest.raises(PeerLost):
        mapped.announce(5, 2)
