"""Every public method of an engine with arguments that make no sense: one clear error each."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.engines import BACKENDS, BOTH, engine_pair, new_engine, offer
from transfer import (
    NOTE_BYTES_MAX,
    Access,
    AccessRefused,
    AddressInvalid,
    PeerLost,
    PeerUnknown,
    PeerUnreachable,
    RegionKey,
    TransferEngine,
    TransferTimeout,
    allocate,
)

SOON_S = 60.0
WRONG = (TypeError, ValueError)
HUGE = 2**63


class Scene:
    """Two connected engines with 64 bytes on each side."""

    def __init__(self, a: TransferEngine, b: TransferEngine) -> None:
        self.a, self.b = a, b
        self.mine, self.theirs = a.register(allocate(64)), b.register(allocate(64))
        self.key = offer(b, self.theirs, a)
        self.tag = 0

    def check_usable(self) -> None:
        """A whole round trip, with an immediate and a notify."""
        self.tag += 1
        self.mine.tensor.random_()
        self.a.write(self.b.name, self.mine, self.key, 0, 0, 64, immediate=self.tag).wait(SOON_S)
        self.b.expect({(self.a.name, self.tag): 1}, timeout_s=SOON_S)
        assert torch.equal(self.mine.tensor, self.theirs.tensor)
        self.a.notify(self.b.name, b"")


@pytest.fixture(scope="module", params=BACKENDS)
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    with engine_pair(request.param) as (a, b):
        yield Scene(a, b)


def write(s: Scene, *offsets: Any, **options: Any) -> Any:
    values: dict[str, Any] = {"peer": s.b.name, "source": s.mine, "target": s.key} | options
    return s.a.write(values.pop("peer"), values.pop("source"), values.pop("target"),
                     *(offsets or (0, 0, 1)), **values)  # fmt: skip


def read(s: Scene, *offsets: Any, **options: Any) -> Any:
    values: dict[str, Any] = {"peer": s.b.name, "target": s.mine, "source": s.key} | options
    return s.a.read(values.pop("peer"), values.pop("target"), values.pop("source"),
                    *(offsets or (0, 0, 1)), **values)  # fmt: skip


def note(s: Scene, **options: Any) -> Any:
    values: dict[str, Any] = {
        "peer": s.b.name, "source": s.mine, "target": s.key, "source_offset": 0,
        "target_offset": 0, "nbytes": 1, "note": b"n",
    }  # fmt: skip
    return s.a.write_with_note(**{**values, **options})


OFFSETS: list[tuple[Any, ...]] = [
    (0.0, 0, 1), (0, 0, 1.0), (True, 0, 1), (0, False, 1), (0, 0, True), ("0", 0, 1), (None, 0, 1),
    (0, 0, -1), (-1, 0, 1), (64, 0, 1), (0, 0, 65), (1, 0, 64), (2**70, 0, 1), (0, 0, 2**70),
    (-(2**70), 0, 1), (HUGE - 1, 0, HUGE - 1), (0, 0, HUGE - 1), ([0, 1], [0, 1, 2], 1),
    ([[0]], 0, 1), ([0.5], 0, 1), ([True], 0, 1), ([0, [1]], 0, 1), (b"00", 0, 1),
    (np.array([HUGE], dtype=np.uint64), 0, 1), (0, 0, np.array([2**64 - 1], dtype=np.uint64)),
    (0, 0, np.array([1, -1])), (np.array([0, 1 << 40]), 0, 1), (0j, 0, 1), (math.nan, 0, 1),
    (np.array([0], dtype="M8[s]"), 0, 1), (object(), 0, 1), ({}, 0, 1),
]  # fmt: skip


@pytest.mark.parametrize("call", [write, read])
@pytest.mark.parametrize("offsets", OFFSETS, ids=repr)
def test_offsets_that_make_no_sense(scene: Scene, call: Any, offsets: tuple[Any, ...]) -> None:
    scene.theirs.tensor.fill_(7)
    scene.mine.tensor.fill_(9)
    with pytest.raises((*WRONG, AccessRefused)):
        call(scene, *offsets).wait(SOON_S)
    assert set(scene.theirs.tensor.tolist()) == {7}
    assert set(scene.mine.tensor.tolist()) == {9}
    scene.check_usable()


@pytest.mark.parametrize("offsets", [(0, -1, 1), (0, 64, 1), (0, 1, 64), (0, HUGE - 1, 1)])
def test_pieces_outside_the_window_are_refused(scene: Scene, offsets: tuple[int, ...]) -> None:
    for call in (write, read):
        source, target, length = offsets
        order = (source, target) if call is write else (target, source)
        with pytest.raises((*WRONG, AccessRefused)):
            call(scene, *(order if call is write else order[::-1]), length).wait(SOON_S)
    scene.check_usable()


def key_with(key: RegionKey, **changes: Any) -> RegionKey:
    fields = {name: getattr(key, name) for name in key.__struct_fields__}
    return RegionKey(**{**fields, **changes})


TIMEOUTS = ["1", math.nan, math.inf, 1e300, True, [1]]
IMMEDIATES = [-1, 2**32, 1.0, "1", True, b"1"]
CALLS: dict[str, list[tuple[Callable[[Scene], Any], tuple[type[BaseException], ...]]]] = {
    "register": [(lambda s, m=m: s.a.register(m), WRONG) for m in (
        None, b"bytes", 5, "x", np.zeros(4), torch.zeros(4, 4).t(), torch.zeros(8)[::2],
        torch.zeros(4, device="meta"), torch.zeros(4, 4).to_sparse(),
        torch.zeros(4, dtype=torch.complex64).conj())],
    "release": [(lambda s, r=r: s.a.release(r), WRONG) for r in (None, 1, torch.zeros(4))],
    "offer": [(lambda s, o=o: s.b.offer(**{"region": s.theirs, "to": "x", "access": BOTH, **o}),
               (*WRONG, PeerUnknown)) for o in (
        {"region": None}, {"region": torch.zeros(4)}, {"to": None}, {"to": 7}, {"to": ""},
        {"access": 3}, {"access": None}, {"access": "READ"}, {"access": Access(0)},
        {"offset": 1.5}, {"offset": -1}, {"offset": 65}, {"offset": True}, {"offset": "0"},
        {"nbytes": 1.5}, {"nbytes": -1}, {"nbytes": 65}, {"nbytes": 2**70}, {"offset": 2**70})],
    "withdraw": [(lambda s, k=k: s.b.withdraw(k), WRONG) for k in (None, b"token", "x", 1)],
    "connect": [(lambda s, a=a: s.a.connect(a, timeout_s=2.0), WRONG) for a in (
        None, 5, b"127.0.0.1:1", "", ":", "x", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536",
        "127.0.0.1:" + "9" * 5000, "a\0b:1", "x" * 300 + ":1", "..:1", "@nobody", ":80")]
    + [(lambda s, t=t: s.a.connect("127.0.0.1:1", timeout_s=t), WRONG) for t in TIMEOUTS],
    "disconnect": [(lambda s, n=n: s.a.disconnect(n, reason="x"), WRONG) for n in (
        None, 1, "", "n" * 65, "two\nlines", "\x1b[2J")],
    "peer": [(lambda s, n=n: s.a.peer(n), (*WRONG, PeerUnknown)) for n in (None, 1, "", "x", [])],
    "process_of": [(lambda s, n=n: s.a.process_of(n), (*WRONG, PeerUnknown)) for n in (
        None, 1, "", "x", [])],
    "write": [(lambda s, o=o: write(s, **o).wait(SOON_S), (*WRONG, AccessRefused, PeerUnknown))
              for o in ({"peer": None}, {"peer": 1}, {"peer": "x"}, {"source": None},
                        {"source": torch.zeros(8)}, {"target": None}, {"target": b"key"})]
    + [(lambda s, i=i: write(s, immediate=i), WRONG) for i in IMMEDIATES]
    + [(lambda s, t=t: write(s, timeout_s=t), WRONG) for t in TIMEOUTS],
    "read": [(lambda s, o=o: read(s, **o).wait(SOON_S), (*WRONG, AccessRefused, PeerUnknown))
             for o in ({"peer": None}, {"peer": 1}, {"peer": "x"}, {"target": None},
                       {"target": torch.zeros(8)}, {"source": None}, {"source": b"key"})]
    + [(lambda s, t=t: read(s, timeout_s=t), WRONG) for t in TIMEOUTS],
    "in_place": [(lambda s, p=p: s.a.in_place(p, s.key), WRONG) for p in (None, 1, [])]
    + [(lambda s, k=k: s.a.in_place(s.b.name, k), WRONG) for k in (None, b"key", 5)],
    "notify": [(lambda s, p=p: s.a.notify(s.b.name, p), WRONG) for p in (
        None, 5, "text", b"x" * ((16 << 20) + 1))]
    + [(lambda s, n=n: s.a.notify(n, b""), (*WRONG, PeerUnknown)) for n in (None, 1, "x")],
    "write_with_note": [(lambda s, o=o: note(s, **o),
                         (*WRONG, AccessRefused, PeerUnknown)) for o in (
        {"peer": None}, {"peer": 1}, {"peer": "x"}, {"source": None}, {"target": b"key"},
        {"note": b""}, {"note": "x"}, {"note": None}, {"note": bytes(NOTE_BYTES_MAX + 1)},
        {"note": bytearray(1)}, {"source_offset": -1}, {"source_offset": 1.0},
        {"source_offset": 64}, {"target_offset": True}, {"target_offset": 64},
        {"target_offset": [0]}, {"nbytes": 65}, {"nbytes": -1}, {"nbytes": 2**70},
        {"nbytes": None}, {"priority": 1}, {"priority": "KV_PUT"})]
    + [(lambda s, t=t: note(s, timeout_s=t), WRONG) for t in TIMEOUTS],
    "on_notes": [(lambda s, h=h: s.b.on_notes(h), WRONG) for h in (None, 1, "handler")],
    "on_notify": [(lambda s, h=h: s.a.on_notify(h), WRONG) for h in (None, 1, "handler")],
    "on_peer_lost": [(lambda s, h=h: s.a.on_peer_lost(h), WRONG) for h in (None, 1, "handler")],
    "expect": [(lambda s, w=w: s.a.expect(w, timeout_s=1.0), WRONG) for w in (
        None, 5, [("x", 1)], {"x": 1}, {("x",): 1}, {(1, 1): 1}, {("x", 1): -1}, {("x", 1): 1.0},
        {("x", 1): None}, {("x", -1): 1}, {("x", 2**32): 1}, {("x", "1"): 1}, {("x", 1): True})]
    + [(lambda s, t=t: s.a.expect({}, timeout_s=t), WRONG) for t in TIMEOUTS],
    "arrived": [(lambda s, w=w: s.a.arrived(w), WRONG) for w in (
        None, 5, {"x": 1}, {("x", 1): -1}, {("x", 1): 0.5})],
    "wait_any": [(lambda s, k=k: s.a.wait_any(k, timeout_s=0.1), WRONG) for k in (
        None, 5, ["x"], [("x",)], [("x", "1")], [("x", -1)], [(1, 1)])]
    + [(lambda s, t=t: s.a.wait_any([], timeout_s=t), WRONG) for t in TIMEOUTS],
    "interrupt": [(lambda s, r=r: s.a.interrupt(r), WRONG) for r in (None, 1)],
}  # fmt: skip
# They take nothing that could be wrong, or are asked elsewhere in this file.
# Their arguments go through the checks of `write` and `read`.
ASKED_ELSEWHERE = {"prepare_write", "prepare_read", "write_pages", "read_pages", "explain"}
WITHOUT = {"open", "close", "peers", "wake", "resume", "statistics", "take_notes"}


@pytest.mark.parametrize(
    ("call", "errors"), [case for cases in CALLS.values() for case in cases],
    ids=[f"{name}-{i}" for name, cases in CALLS.items() for i in range(len(cases))],
)  # fmt: skip
def test_a_call_that_makes_no_sense(
    scene: Scene, call: Callable[[Scene], Any], errors: tuple[type[BaseException], ...]
) -> None:
    offers = scene.b.statistics().offers
    with pytest.raises(errors) as caught:
        call(scene)
    assert len(str(caught.value)) < 500
    assert str(caught.value), "it says what is wrong"
    assert scene.b.statistics().offers == offers
    scene.check_usable()


@pytest.mark.parametrize("timeout_s", TIMEOUTS, ids=repr)
@pytest.mark.parametrize("pieces", [([0, 32], [3, 5], 17), (0, 3, 17)], ids=["scattered", "one"])
def test_waiting_for_no_time_is_refused_by_name(
    scene: Scene, timeout_s: Any, pieces: tuple[Any, Any, int]
) -> None:
    transfer = write(scene, *pieces)
    for _ in ("under way, perhaps", "ended"):
        with pytest.raises(WRONG, match="timeout_s must be"):
            transfer.wait(timeout_s)
        with pytest.raises(WRONG, match="timeout_s must be"):
            transfer.wait(timeout_s=timeout_s)
        transfer.wait()
    scene.check_usable()


def test_no_public_method_was_forgotten() -> None:
    members = inspect.getmembers(TransferEngine, inspect.isfunction)
    public = {name for name, _ in members if not name.startswith("_")}
    asked = set(CALLS) | WITHOUT
    assert set(CALLS) <= public
    assert public - asked <= ASKED_ELSEWHERE


@pytest.mark.parametrize("changes", [
    {"token": b"short"}, {"token": "x" * 16}, {"nbytes": -1}, {"nbytes": HUGE}, {"nbytes": 1.0},
    {"rights": 0}, {"rights": 4}, {"rights": "1"}, {"owner": None}, {"owner": b"x"}])  # fmt: skip
def test_a_key_is_checked_when_it_is_made(scene: Scene, changes: dict[str, Any]) -> None:
    with pytest.raises(WRONG):
        key_with(scene.key, **changes)


def test_a_forged_key_reaches_nothing_new(scene: Scene) -> None:
    for changes in ({"token": b"f" * 16}, {"nbytes": HUGE - 1}, {"nbytes": 128}):
        forged = key_with(scene.key, **changes)
        with pytest.raises((*WRONG, AccessRefused)):
            write(scene, 0, 100, 1, target=forged).wait(SOON_S)
    with pytest.raises(ValueError, match="the key is"):
        write(scene, target=key_with(scene.key, owner="somebody"))
    scene.check_usable()


def test_a_deadline_that_has_passed_is_a_timeout_or_done(scene: Scene) -> None:
    for timeout_s in (0, -1.0, -1e9):
        with contextlib.suppress(TransferTimeout):
            write(scene, timeout_s=timeout_s).wait()
    scene.check_usable()


@pytest.mark.parametrize(
    "name", ["", "n" * 65, "two\nlines", "bell\a", "\x1b[2J", "\u202e", 5, None]
)
def test_names_can_be_shown(name: Any) -> None:
    from transfer.arguments import check_name

    with pytest.raises(WRONG):
        check_name(name)


def test_a_closed_memory_is_not_registered() -> None:
    memory = allocate(64)
    with new_engine() as engine:
        memory.close()
        with pytest.raises(ValueError, match="closed"):
            engine.register(memory)


def test_memory_that_is_freed_or_resized_stays_readable(scene: Scene) -> None:
    tensor = torch.full((64,), 5, dtype=torch.uint8)
    region = scene.b.register(tensor)
    key = offer(scene.b, region, scene.a)
    with pytest.raises(RuntimeError, match="resiz"):
        tensor.untyped_storage().resize_(0)
    tensor.data = torch.empty(0, dtype=torch.uint8)
    del tensor
    read(scene, 0, 0, 64, source=key).wait(SOON_S)
    assert set(scene.mine.tensor.tolist()) == {5}
    shared = allocate(64)
    closed = offer(scene.b, scene.b.register(shared), scene.a)
    shared.close()
    with contextlib.suppress(AccessRefused):  # its file is gone: it cannot be mapped any more
        write(scene, 0, 0, 64, target=closed).wait(SOON_S)
    scene.check_usable()


def test_overlapping_and_misaligned_pieces(scene: Scene) -> None:
    """Where targets overlap either piece may win; every byte is of one of them."""
    scene.mine.tensor.copy_(torch.arange(64, dtype=torch.uint8))
    scene.theirs.tensor.fill_(255)
    write(scene, [0, 32], [3, 5], 17).wait(SOON_S)
    got = scene.theirs.tensor.tolist()
    for i, value in enumerate(got):
        allowed = {255} if not 3 <= i < 22 else set()
        allowed |= {i - 3} if 3 <= i < 20 else set()
        allowed |= {32 + i - 5} if 5 <= i < 22 else set()
        assert value in allowed, i
    write(scene, [], [], []).wait(SOON_S)
    scene.check_usable()


def test_a_fenced_name_stays_out_of_offers() -> None:
    with new_engine() as engine:
        engine.disconnect("somebody", reason="x\ny")
        region = engine.register(torch.zeros(4))
        with pytest.raises(PeerLost):
            engine.offer(region, to="somebody", access=BOTH)


@pytest.mark.parametrize(
    "address",
    ["nonsense", "", "host", "host:", "host:0", "host:99999", "host:-1", "a\0b:1", "..:1", "@x"],
)
def test_what_is_no_address_is_the_callers_error(scene: Scene, address: str) -> None:
    with pytest.raises(AddressInvalid, match="expected HOST:PORT") as caught:
        scene.a.connect(address)
    assert not caught.value.retryable
    assert caught.value.address == address
    assert isinstance(caught.value, ValueError)
    scene.check_usable()


def test_a_name_that_nobody_knows_yet_may_be_known_later(scene: Scene) -> None:
    with pytest.raises(PeerUnreachable) as caught:
        scene.a.connect("no-such-host.invalid:1")
    assert caught.value.retryable
