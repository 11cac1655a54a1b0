"""Rails of queue pairs between two processes: bytes, immediates, refusals, cuts, leaks."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from transfer import AccessRefused, RegionUnknown, TransferTimeout
from transfer.memory.region import Access, Region, RegionKey
from transfer.priority import Priority

pytest.importorskip("pyverbs", reason="pyverbs comes with the host's RDMA libraries; none here")

from tests.support.fabric import lose_silently, mute, pull, repair, slow_down
from tests.support.verbs_node import Owner, VerbsNode, random_bytes

MIB = 1 << 20
READ, WRITE, BOTH = Access.READ.value, Access.WRITE.value, Access.READ.value | Access.WRITE.value


@pytest.fixture
def pair() -> Iterator[tuple[VerbsNode, Owner]]:
    owner = Owner(("rxe2", "rxe3"))
    node = VerbsNode("user", "owner", ("rxe0", "rxe1"), owner.pipe)
    try:
        yield node, owner
    finally:
        node.close()
        owner.close()


@pytest.fixture
def one_rail() -> Iterator[tuple[VerbsNode, Owner]]:
    owner = Owner(("rxe2",))
    node = VerbsNode("user", "owner", ("rxe0",), owner.pipe)
    try:
        yield node, owner
    finally:
        node.close()
        owner.close()


def host(nbytes: int, seed: int | None = None) -> Region:
    data = torch.zeros(nbytes, dtype=torch.uint8) if seed is None else random_bytes(nbytes, seed)
    return Region(data)


def scattered(rng: np.random.Generator, nbytes: int, count: int) -> tuple[Any, Any, Any]:
    """Disjoint target pieces of random lengths, from anywhere, some of them neighbours."""
    edges = np.sort(rng.choice(nbytes, 2 * count, replace=False)).astype(np.int64)
    targets, lengths = edges[::2], np.diff(edges)[::2]
    glued = rng.random(count - 1) < 0.5
    lengths[:-1][glued] = np.diff(targets)[glued]
    sources = rng.integers(0, nbytes - lengths.max(), count)
    order = rng.permutation(count) if rng.random() < 0.5 else np.arange(count)
    return sources[order], targets[order], lengths[order]


def test_scattered_writes_and_reads_move_the_right_bytes(pair: Any, seed: int) -> None:
    node, owner = pair
    rng = np.random.default_rng(seed)
    nbytes = 3 * MIB
    window = owner.ask("make", nbytes)
    key = owner.ask("offer", window, BOTH)
    source = host(nbytes, seed)
    expected = np.zeros(nbytes, dtype=np.uint8)
    for count in (1, 2, 700, 5000):
        sources, targets, lengths = scattered(rng, nbytes, count)
        node.write(source, key, sources, targets, lengths, immediate=count).wait()
        for s, t, n in zip(sources, targets, lengths, strict=True):
            expected[t : t + n] = source.array[s : s + n]
        assert owner.ask("count", count, 1) == 1
        assert owner.ask("bytes", window) == expected.tobytes()
        back = host(nbytes)
        node.read(back, key, sources, targets, lengths).wait()
        wanted = np.zeros(nbytes, dtype=np.uint8)
        for s, t, n in zip(sources, targets, lengths, strict=True):
            wanted[s : s + n] = expected[t : t + n]
        if not _overlap(sources, lengths):
            assert back.array.tobytes() == wanted.tobytes()
    whole = host(nbytes)
    node.read(whole, key, 0, 0, nbytes).wait()
    assert whole.array.tobytes() == expected.tobytes()


def _overlap(starts: Any, lengths: Any) -> bool:
    order = np.argsort(starts)
    return bool((starts[order][1:] < (starts + lengths)[order][:-1]).any())


def test_immediates_are_counted_after_the_bytes(one_rail: Any, seed: int) -> None:
    node, owner = one_rail
    window = owner.ask("make", 4096)
    key = owner.ask("offer", window, WRITE)
    number = 0xC0FFEE01  # no palindrome: a swapped byte order is seen
    for i in range(20):
        source = host(4096, seed + i)
        node.write(source, key, 0, 0, 4096, immediate=number, priority=Priority.ACTIVATIONS).wait()
        assert owner.ask("count", number, i + 1) == i + 1
        assert owner.ask("bytes", window) == source.array.tobytes()
    node.write(host(1), key, 0, 0, 0, immediate=5).wait()
    assert owner.ask("count", 5, 1) == 1
    assert owner.ask("counted") == {number: 20, 5: 1}


def test_more_immediates_than_receives(one_rail: Any) -> None:
    node, owner = one_rail
    key = owner.ask("offer", owner.ask("make", 4096), WRITE)
    source = host(4096)
    transfers = []
    for i in range(1500):
        transfers.append(node.write(source, key, 0, i % 4000, 1, immediate=i % 3))
        if len(transfers) == 200:
            for transfer in transfers:
                transfer.wait()
            transfers.clear()
    for transfer in transfers:
        transfer.wait()
    assert [owner.ask("count", i, 500) for i in range(3)] == [500] * 3


def test_a_withdrawn_key_is_refused_and_the_rail_goes_on(one_rail: Any, seed: int) -> None:
    node, owner = one_rail
    window = owner.ask("make", 4096)
    key, other = owner.ask("offer", window, WRITE), owner.ask("offer", window, WRITE)
    source = host(4096, seed)
    node.write(source, key, 0, 0, 4096).wait()
    kept = node.exchange._keys.find(key.token)
    owner.ask("withdraw", key)
    with pytest.raises(RegionUnknown):
        node.write(source, key, 0, 0, 4096).wait()
    # The card itself refuses: what is known of the key is put back.
    node.exchange._keys._places[key.token] = kept
    with pytest.raises(RegionUnknown):
        node.write(source, key, 0, 0, 4096, immediate=3).wait()
    node.write(source, other, 0, 0, 4096, immediate=4).wait()
    assert owner.ask("count", 4, 1) == 1
    assert owner.ask("counted") == {4: 1}
    assert node.requests.rails()[0].failures == 0, "a refusal is no failure of the rail"


def test_the_card_refuses_what_is_outside_of_the_window(one_rail: Any, seed: int) -> None:
    """Nothing at this side checks: `VerbsNode` has no such check, the card at the owner has."""
    node, owner = one_rail
    window = owner.ask("make", 16384)
    key = owner.ask("offer", window, BOTH, 4096, 4096)
    source = host(8192, seed)
    for offset, length in ((4000, 200), (-1, 10), (4096, 1), (0, 4097)):
        with pytest.raises(AccessRefused):
            node.write(source, key, 0, offset, length).wait()
        with pytest.raises(AccessRefused):
            node.read(source, key, 0, offset, length).wait()
    assert owner.ask("bytes", window) == bytes(16384)
    node.write(source, key, 0, 0, 4096).wait()
    assert owner.ask("bytes", window)[4096:8192] == source.array[:4096].tobytes()


def test_rights_are_kept_by_the_card(one_rail: Any, seed: int) -> None:
    node, owner = one_rail
    window = owner.ask("make", 4096)
    readable, writable = owner.ask("offer", window, READ), owner.ask("offer", window, WRITE)
    source = host(4096, seed)
    with pytest.raises(AccessRefused):
        node.write(source, readable, 0, 0, 64).wait()
    with pytest.raises(AccessRefused):
        node.read(source, writable, 0, 0, 64).wait()
    assert owner.ask("bytes", window) == bytes(4096)


def test_a_key_of_another_peer_is_useless(one_rail: Any, seed: int) -> None:
    node, owner = one_rail
    window = owner.ask("make", 4096)
    key = owner.ask("offer", window, BOTH, 0, 4096, "somebody")
    source = host(4096, seed)
    with pytest.raises(RegionUnknown):
        node.write(source, key, 0, 0, 64).wait()
    # Even with what the owner told somebody else: the memory is in that peer's domain.
    place = owner.ask("place_in_other_domain", key)
    node.exchange._keys._places[key.token] = (place,)
    with pytest.raises(AccessRefused):
        node.write(source, key, 0, 0, 64).wait()
    assert owner.ask("bytes", window) == bytes(4096)


def test_an_operation_that_is_given_up_touches_nothing_more(one_rail: Any, fabric: None) -> None:
    node, owner = one_rail
    window = owner.ask("make", 4 * MIB)
    key = owner.ask("offer", window, BOTH)
    node.read(host(64), key, 0, 0, 64).wait()
    slow_down(2, rate="20mbit")
    owner.ask("fill", window, 1)
    target = host(4 * MIB)
    with pytest.raises(TransferTimeout):
        node.read(target, key, 0, 0, 4 * MIB, timeout_s=0.5).wait()
    seen = target.array.tobytes()
    assert 0 < len(seen.strip(b"\0")) < 4 * MIB, "the fault must hit in the middle"
    repair()
    time.sleep(1.0)
    assert target.array.tobytes() == seen
    node.read(target, key, 0, 0, 4 * MIB).wait()
    assert target.array.tobytes() == owner.ask("bytes", window)


@pytest.mark.parametrize("fault", [pull, lose_silently])
def test_a_cut_rail_costs_no_operation(
    pair: Any, fabric: None, seed: int, fault: Callable[[int], None]
) -> None:
    node, owner = pair
    nbytes = 12 * MIB
    window = owner.ask("make", nbytes)
    key = owner.ask("offer", window, WRITE)
    deadline = time.monotonic() + 60
    while [rail.open for rail in node.requests.rails()] != [True, True]:
        assert time.monotonic() < deadline, "both rails are to be open before the fault"
        node.write(host(4 * MIB), key, 0, 0, 4 * MIB).wait()
    slow_down(0, 1, rate="20mbit")
    source = host(nbytes, seed)
    transfers = [node.write(source, key, i * MIB, i * MIB, MIB, immediate=7) for i in range(12)]
    while not any(transfer.bytes_moved for transfer in transfers):
        time.sleep(0.005)
    fault(0)
    assert not all(transfer.done() for transfer in transfers), "the fault must hit in the middle"
    started = time.monotonic()
    for transfer in transfers:
        transfer.wait()
    print(f"{fault.__name__}: the rest took {time.monotonic() - started:.2f} s")
    assert owner.ask("count", 7, 12) == 12
    assert owner.ask("bytes", window) == source.array.tobytes()
    assert max(rail.failures for rail in node.requests.rails()) > 0, "the fault did not fire"
    _comes_back(node, source, key)
    time.sleep(0.2)
    assert owner.ask("counted") == {7: 12}, "an immediate was counted twice"


def test_what_arrived_without_acknowledgement_is_not_sent_again(
    one_rail: Any, fabric: None, seed: int
) -> None:
    node, owner = one_rail
    window = owner.ask("make", 4096)
    key = owner.ask("offer", window, WRITE)
    source = host(4096, seed)
    node.write(source, key, 0, 0, 64, immediate=1).wait()
    mute(2)
    transfers = [
        node.write(source, key, 0, 0, 4096, immediate=2, priority=priority)
        for priority in (Priority.ACTIVATIONS, Priority.KV_PUT)
        for _ in range(3)
    ]
    assert owner.ask("count", 2, 6) == 6
    assert not any(transfer.done() for transfer in transfers), "the fault must hit in the middle"
    for transfer in transfers:
        transfer.wait()
        assert transfer.attempts == 1
    repair()
    node.write(source, key, 0, 0, 64, immediate=3).wait()
    assert owner.ask("count", 3, 1) == 1
    assert owner.ask("counted") == {1: 1, 2: 6, 3: 1}
    assert owner.ask("bytes", window) == source.array.tobytes()


def _comes_back(node: VerbsNode, source: Region, key: RegionKey) -> None:
    """Put the cable back; the rail must carry bytes again."""
    repair()
    before = _bytes_of(node, "rxe0")
    deadline = time.monotonic() + 60
    while _bytes_of(node, "rxe0") == before:
        assert time.monotonic() < deadline, f"the rail did not come back: {node.requests.rails()}"
        node.write(source, key, 0, 0, 4 * MIB).wait()


def _bytes_of(node: VerbsNode, device: str) -> int:
    return sum(rail.bytes for rail in node.requests.rails() if f" {device}->" in rail.rail)


def test_a_killed_owner_leaves_nothing_behind(seed: int) -> None:
    owner = Owner(("rxe2",))
    node = VerbsNode("user", "owner", ("rxe0",), owner.pipe)
    key = owner.ask("offer", owner.ask("make", MIB), WRITE)
    source = host(MIB, seed)
    node.write(source, key, 0, 0, MIB).wait()
    os.kill(owner.process.pid, signal.SIGKILL)
    owner.process.join()
    with pytest.raises(TransferTimeout):  # who tells of the death is the engine's business
        node.write(source, key, 0, 0, MIB, timeout_s=2.0).wait()
    started = time.monotonic()
    node.close()
    assert time.monotonic() - started < 10
    owner.commands.close()
    assert resources()["qp"] == 0


def resources() -> dict[str, int]:
    """Verbs objects of this whole machine, by kind, as the kernel counts them."""
    text = subprocess.run(["rdma", "resource"], capture_output=True, text=True, check=True).stdout
    totals: dict[str, int] = {}
    for line in text.splitlines():
        words = line.split()[2:]
        for kind, count in zip(words[::2], words[1::2], strict=True):
            # Queue pair 1 of each device is the kernel's own.
            totals[kind] = totals.get(kind, 0) + int(count)
    for kind in ("qp", "cq", "pd"):
        totals[kind] -= _kernels_own.get(kind, 0)
    return totals


_kernels_own: dict[str, int] = {}


@pytest.fixture(autouse=True, scope="module")
def kernels_own() -> None:
    _kernels_own.update(resources())


def test_cycles_leave_no_objects_and_no_descriptors(seed: int) -> None:
    descriptors = []
    for i in range(50):
        owner = Owner(("rxe2",))
        node = VerbsNode("user", "owner", ("rxe0",), owner.pipe)
        key = owner.ask("offer", owner.ask("make", 4096), WRITE)
        node.write(host(4096, seed), key, 0, 0, 4096, immediate=1).wait()
        assert owner.ask("count", 1, 1) == 1
        node.close()
        owner.close()
        if i in (4, 49):
            descriptors.append(len(os.listdir("/proc/self/fd")))
    assert descriptors[1] <= descriptors[0]
    left = {kind: count for kind, count in resources().items() if kind in ("qp", "mr", "srq")}
    assert not any(left.values()), left


def test_regions_that_are_gone_are_deregistered(one_rail: Any, seed: int) -> None:
    node, owner = one_rail
    window = owner.ask("make", 4096)
    key = owner.ask("offer", window, WRITE)
    domain = None
    for _ in range(20):
        node.write(host(4096, seed), key, 0, 0, 4096).wait()
        (domain,) = node.exchange._domains.values()
        gc.collect()  # an operation and its slices know each other
        assert domain.num_registered <= 3, "the regions are gone, their registrations are not"
    assert owner.ask("registered") == 1
    owner.ask("withdraw", key)
    assert owner.ask("registered") == 0
