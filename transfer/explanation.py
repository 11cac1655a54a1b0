"""Which way bytes to a peer take, and why not another: for people who wonder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from transfer.connections.handshake import Facts
from transfer.memory.region import Access, Region, RegionKey
from transfer.peer import PeerLink
from transfer.rails.rail import RailState
from transfer.statistics import RailStatistics

# A rail that is slower than this part of the fastest gets little to do.
SLOW: Final = 0.25
BOTH: Final = (Access.READ | Access.WRITE).value
CHEAPER: Final = "a copy in memory is cheaper"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The answer of `TransferEngine.explain`. Its text is meant for people.

    Attributes:
        peer: the other side.
        backend: what moves the bytes: a name as of `TransferStatistics.backends`.
        reason: why that one.
        rails: the rails that were opened, those that suit the memory best first.
        others: backends that are not used, each with the reason.
        unused: rails, and ends of rails of ours, that are not used, each with the reason.
    """

    peer: str
    backend: str
    reason: str
    rails: tuple[RailStatistics, ...] = ()
    others: tuple[tuple[str, str], ...] = ()
    unused: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.peer}: {self.backend} ({self.reason})"]
        for rail in self.rails:
            known = f"{rail.bandwidth / 1e9:.2f} GB/s" if rail.bandwidth else "not measured"
            state = rail.state if rail.open else f"{rail.state}, not open"
            lines.append(f"  rail {rail.rail}: {state}, {known}, {rail.failures} failures")
        lines += [f"  not {name}: {reason}" for name, reason in (*self.unused, *self.others)]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What an engine knows about the ways to a peer.

    Attributes:
        own: what this engine tells about itself.
        no_verbs: why it has no RDMA devices; "" if it has.
        rails: that could lead to the peer, each with what speaks against it, "" if nothing does.
        unused: ends of ours that make no rail, each with the reason.
    """

    own: Facts
    no_verbs: str
    rails: tuple[tuple[str, str], ...]
    unused: tuple[tuple[str, str], ...]


def explain_self(name: str) -> Explanation:
    """Explain copies within this process."""
    return Explanation(peer=name, backend="local", reason="it is this process itself")


def explain_link(
    around: Surroundings, link: PeerLink, memory: Region | RegionKey | None
) -> Explanation:
    """Explain the way to a connected peer.

    Args:
        around: what else could be used.
        link: the connection.
        memory: our region or the peer's key that is to be moved; None = what `allocate` made.
    """
    if memory is not None and memory.kind != "host":
        return _explain_storage(link, memory)
    # Only the peer's end is mapped: whatever our region is, it is copied from where it lies.
    mappable = memory.shareable if isinstance(memory, RegionKey) else True
    region = memory if isinstance(memory, Region) else None
    if link.backend == "shared_memory" and mappable:
        return Explanation(
            peer=link.name,
            backend="shared_memory",
            reason="same host, and the peer's memory can be mapped here",
            others=(("verbs", CHEAPER), ("tcp", CHEAPER)),
        )
    rails = tuple(link.rails(region))
    if link.backend == "shared_memory":
        return Explanation(
            peer=link.name,
            backend="process_memory",
            reason="same host; where the system does not permit it, over the local socket",
            rails=rails,
            others=(("shared_memory", "the memory was not made by `allocate`: not mappable"),),
        )
    others = [("shared_memory", _why_not_shared(around.own, link.facts))]
    if link.backend != "verbs":
        others.append(("verbs", _why_not_verbs(around.no_verbs, link)))
    return Explanation(
        peer=link.name,
        backend=link.backend,
        reason="the best that both sides have in common",
        rails=rails,
        others=tuple(others),
        unused=(*_unused_rails(around, rails, time.monotonic()), *around.unused),
    )


def _unused_rails(
    around: Surroundings, rails: Sequence[RailStatistics], now: float
) -> list[tuple[str, str]]:
    fastest = max((rail.bandwidth for rail in rails), default=0.0)
    found = [(rail.rail, _why_not_rail(rail, fastest, now)) for rail in rails]
    opened = {rail.rail for rail in rails}
    found += [
        (name, f"not opened yet{against and f'; {against}'}")
        for name, against in around.rails
        if name not in opened
    ]
    return [(name, reason) for name, reason in found if reason]


def _why_not_rail(rail: RailStatistics, fastest: float, now: float) -> str:
    if rail.state == RailState.COOLING:
        return f"cooling since {now - rail.failed_at:.1f} s: {rail.evidence or 'not opened'}"
    if rail.state == RailState.PROBING:
        return f"probing, after it has failed {now - rail.failed_at:.1f} s ago: {rail.evidence}"
    if not rail.open:
        return "closed; it is opened again when there is need"
    if 0.0 < rail.bandwidth < SLOW * fastest:
        return f"measured slower, {rail.bandwidth / 1e9:.2f} of {fastest / 1e9:.2f} GB/s"
    return ""


def _explain_storage(link: PeerLink, memory: Region | RegionKey) -> Explanation:
    backend = memory.kind.partition(":")[0]
    if isinstance(memory, Region):
        reason = f"our {memory.kind} memory goes through a buffer, then over the peer's rails"
        rails = tuple(link.rails())
        return Explanation(peer=link.name, backend=backend, reason=reason, rails=rails)
    if backend == "cuda" and link.backend == "shared_memory" and memory.rights == BOTH:
        return Explanation(
            peer=link.name,
            backend=backend,
            reason="same host: CUDA IPC where the device is seen here, else as of other hosts",
        )
    return Explanation(
        peer=link.name,
        backend=backend,
        reason="only the owner can move it: between there and a buffer of ours",
        rails=tuple(link.rails()),
        others=(("cuda_ipc", "not on one host, or without both rights"),)
        if backend == "cuda"
        else (),
    )


def _why_not_verbs(missing: str, link: PeerLink) -> str:
    if missing:
        return missing
    if link.rdma is None:
        return "the peer has no RDMA devices"
    return "no rail between its RDMA devices and ours could be opened"


def _why_not_shared(own: Facts, theirs: Facts) -> str:
    if own.host != theirs.host:
        return "the peer is on another host, or in another network namespace"
    if not own.shared_memory:
        return "this engine's configuration excludes it"
    return "the peer does not share memory"
