"""What is larger than a slice is one request where that takes no longer than a slice may."""

from __future__ import annotations

import secrets
import time

import numpy as np
import pytest
import torch

from configs.schema import TransferConfig
from tests.unit.transfer.test_express import Scene
from transfer import Access, TransferEngine, native
from transfer.memory.region import Region, RegionKey
from transfer.priority import Priority
from transfer.rails.bulk import URGENT_MEMORY_S
from transfer.rails.express import Express
from transfer.rails.spray import SLICE_S
from transfer.wire import PAYLOAD_BYTES_MAX, SLICE_BYTES

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(not native.COMPILED, reason="without the compiled part no short way"),
]

FAST = SLICE_BYTES / SLICE_S


@pytest.fixture
def scene():
    made = Scene()
    made.region = Region(torch.zeros(PAYLOAD_BYTES_MAX + 1, dtype=torch.uint8))
    made.key = RegionKey("peer", made.key.token, PAYLOAD_BYTES_MAX + 1, 3, False)
    yield made
    made.close()


def test_it_goes_the_short_way_over_a_fast_rail_only(scene: Scene) -> None:
    load = scene.link.load
    for bandwidth, taken in ((FAST * 0.99, False), (FAST * 1.01, True)):
        load.bandwidth = bandwidth
        message = scene.post(SLICE_BYTES + 1)
        assert (type(message) is Express) is taken
        if taken:
            scene.link.answer()
            message.wait()
    assert scene.post(PAYLOAD_BYTES_MAX + 1) is None, "no request carries so much"


def test_what_is_urgent_or_beside_it_is_cut_into_slices(scene: Scene) -> None:
    scene.link.load.bandwidth = FAST * 10
    assert scene.post(SLICE_BYTES + 1, priority=Priority.ACTIVATIONS) is None
    assert scene.post(SLICE_BYTES + 1, immediate=5) is None
    urgent = scene.posted(100)
    scene.link.answer()
    urgent.wait()
    assert scene.post(SLICE_BYTES + 1) is None, "one was just there"


def test_bytes_of_one_request_are_those_of_its_slices() -> None:
    """Both ways, between two engines: over a rail that is thought slow, then fast."""
    config, secret = TransferConfig(backend="tcp"), secrets.token_bytes(32)
    one = TransferEngine(config, name=secrets.token_hex(8), secret=secret)
    two = TransferEngine(config, name=secrets.token_hex(8), secret=secret)
    nbytes = PAYLOAD_BYTES_MAX
    with one, two:
        peer = one.connect(two.address)
        window = two.register(torch.zeros(nbytes, dtype=torch.uint8))
        key = two.offer(window, to=one.name, access=Access.READ | Access.WRITE)
        region = one.register(torch.zeros(nbytes, dtype=torch.uint8))
        one.write(peer, region, key, 0, 0, 1).wait(60.0)  # the rail is open then
        [load] = [rail.load for rail in one._table.get(peer.name).requests._core.rails]
        for fast in (False, True):
            load.bandwidth = FAST * 10 if fast else 1.0
            time.sleep(2 * URGENT_MEMORY_S)
            region.array[:] = sent = np.frombuffer(secrets.token_bytes(nbytes), dtype=np.uint8)
            written = one.write(peer, region, key, 0, 0, nbytes)
            assert (type(written) is Express) is fast
            written.wait(60.0)
            assert (window.array == sent).all()
            window.array[:] = other = np.frombuffer(secrets.token_bytes(nbytes), dtype=np.uint8)
            load.bandwidth = FAST * 10 if fast else 1.0  # what was measured meanwhile is another
            read = one.read(peer, region, key, 0, 0, nbytes)
            assert (type(read) is Express) is fast
            read.wait(60.0)
            assert (region.array == other).all()
