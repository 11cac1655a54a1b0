"""What the sprayer makes of preferred rails, and where a region's memory is."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.schema import TransferConfig
from tests.support.machines import machine
from transfer import Access, TransferEngine, allocate
from transfer.handle import Transfer
from transfer.memory.region import Region
from transfer.pieces import Pieces
from transfer.priority import Priority
from transfer.rails import peer_preferences
from transfer.rails.peer_preferences import RailPreferences, location_of
from transfer.rails.slices import Operation, slice_operation
from transfer.rails.spray import SprayCore
from transfer.topology.machine import Topology
from transfer.wire import RequestKind

NBYTES = 256 << 10


def first_choice(rails: tuple[tuple[int, ...], ...], num_rails: int) -> int:
    """Return the rail that an operation's first slice goes over, all being idle and alike."""
    core = SprayCore(num_rails, shares=dict.fromkeys(Priority, 1.0), room=lambda idx, urgent: 8)
    for rail in core.rails:
        core.opened(rail)
    handle = Transfer(
        peer="peer", operation="write", backend="tcp", nbytes=NBYTES,
        deadline=time.monotonic() + 60,
    )  # fmt: skip
    operation = Operation(
        kind=RequestKind.WRITE, handle=handle, token=b"", region=None, immediate=None,
        priority=Priority.ACTIVATIONS, rails=rails,
    )  # fmt: skip
    zero, whole = np.zeros(1, np.int64), np.array([NBYTES], np.int64)
    pieces = Pieces(source_offsets=zero, target_offsets=zero, lengths=whole)
    slice_operation(operation, pieces, slice_bytes=NBYTES, slice_pieces=1)
    core.add(operation)
    rail = core.choose(operation.slices[0], time.monotonic())
    assert rail is not None
    return rail.idx


@pytest.mark.parametrize(
    ("rails", "chosen"),
    [((), 0), (((0, 1, 2),), 0), (((2,), (0, 1)), 2), (((1, 2), (0,)), 1), (((2, 1), (0,)), 1)],
)
def test_alike_rails_are_taken_by_tier(rails: tuple[tuple[int, ...], ...], chosen: int) -> None:
    assert first_choice(rails, 3) == chosen


def test_a_region_is_where_it_was_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_preferences, "numa_nodes", lambda: (0, 1))
    elsewhere = Region(torch.zeros(64, dtype=torch.uint8))
    with closing(allocate(4096, numa_node=0)) as memory:
        assert location_of(Region(memory)) == "cpu:0"
    assert location_of(elsewhere) is None
    monkeypatch.setattr(peer_preferences, "numa_nodes", lambda: (0,))
    assert location_of(elsewhere) == "cpu:0"
    elsewhere.kind = "cuda:3"
    assert location_of(elsewhere) == "cuda:3"
    elsewhere.kind = "file"
    assert location_of(elsewhere) is None


def test_an_order_only_where_there_is_a_choice(tmp_path: Path) -> None:
    found = machine("two_sockets_8_gpus_8_nics", tmp_path)
    looks = []

    def look() -> Topology:
        looks.append(1)
        return found

    rails = ["10.14.0.5", "10.10.0.5", "10.11.0.5"]
    preferences = RailPreferences(rails, look=look)
    assert preferences.order("cuda:1") == ((2,), (1,), (0,))
    assert preferences.order("cpu:0") == ((1, 2), (0,))
    assert preferences.order("cpu:0") == ((1, 2), (0,))
    assert preferences.order(None) == ()
    assert len(looks) == 1
    assert RailPreferences(rails[:1], look=look).order("cpu:0") == ()
    assert RailPreferences(["127.0.0.1", "127.0.0.2"], look=look).order("cpu:0") == ()
    assert len(looks) == 2


def test_operations_ask_for_the_order_of_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def prefer(self: RailPreferences, location: str | None) -> tuple[tuple[int, ...], ...]:
        asked.append(location)
        return ((1,), (0,))

    monkeypatch.setattr(RailPreferences, "order", prefer)
    config = TransferConfig(backend="tcp", rails=("127.0.0.1", "127.0.0.2"))
    secret = b"s" * 32
    with (
        TransferEngine(config, name="a" * 16, secret=secret) as sender,
        TransferEngine(config, name="b" * 16, secret=secret) as receiver,
        closing(allocate(NBYTES, numa_node=0)) as target,
    ):
        peer = sender.connect(receiver.address)
        window = receiver.register(target)
        key = receiver.offer(window, to=sender.name, access=Access.WRITE)
        content = torch.randint(0, 256, (NBYTES,), dtype=torch.uint8)
        with closing(allocate(NBYTES, numa_node=0)) as memory:
            source = sender.register(memory)
            source.tensor.copy_(content)
            sender.write(peer, source, key, 0, 0, NBYTES).wait(30)
            assert asked == ["cpu:0"]
            assert window.tensor.equal(content)
            sender.release(source)
        receiver.withdraw(key)
        receiver.release(window)
