"""The clock: operations one after another, or several in flight, and what they cost both sides.

A latency is from the call that submits to the return of the wait, at the initiator. That bytes
are in place by then is looked at after every measurement, with bytes that were not there before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

import numpy as np

from moe_runtime.bench.errors import BytesDiffer, TargetEnded
from moe_runtime.bench.messages import Clocks, Compare, Compared, Fill, Read
from moe_runtime.bench.remote import NotifyRemote, Remote, Witness
from moe_runtime.bench.usage import Usage, other_cores, usage_now
from moe_runtime.bench.workload import (
    Case,
    Placement,
    differing_piece,
    fill,
    placements,
    shown_size,
)
from transfer import PeerLost, PeerUnknown, Region, RegionKey

WARM_OPERATIONS: Final = 3
#: looks at the target's memory, each right after an operation
LOOKS: Final = 3
OPERATIONS_MAX: Final = 4_000_000


class Handle(Protocol):
    """What posting an operation returns: a `Transfer`, or what is like it."""

    backend: str

    def wait(self) -> None:
        """Wait until it has ended."""


Post = Callable[[], Handle]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One row.

    Attributes:
        operation: "write" or "read".
        size: bytes of a piece.
        blocks: pieces per operation.
        batch: operations in flight.
        backend: that moved the bytes.
        operations: made in `seconds`.
        gb_s: 1e9 bytes a second.
        ops_s: operations a second.
        p50_us: microseconds, submit to completion; p99_us, p999_us alike.
        cpu_s_per_gb: processor seconds of both sides, all threads, per 1e9 bytes.
        cpu_initiator_s: of this side.
        cpu_target_s: of the other side.
        other_cores: kept busy by others, on the busier host.
        checked: "seen" (looked at in the target's memory the moment an operation ended), "told"
            (compared by the target when asked), "own" (a read: compared here), or "no".
    """

    operation: str
    size: int
    blocks: int
    batch: int
    backend: str
    operations: int
    seconds: float
    gb_s: float
    ops_s: float
    p50_us: float
    p99_us: float
    p999_us: float
    cpu_s_per_gb: float
    cpu_initiator_s: float
    cpu_target_s: float
    other_cores: float
    checked: str

    def rounded(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {k: round(v, 5) if isinstance(v, float) else v for k, v in asdict(self).items()}


class Measurer:
    """Measures cases between an engine and a target's window. Not thread-safe.

    Args:
        engine: has the writes and reads of a `TransferEngine`.
        region: of this side, as large as the window.
        witness: a look at the target's memory, if there is one.
        options: further arguments of `write` and `read`: a priority.
        prepared: whether operations are prepared once and only posted while the clock runs.
        same_host: whether the target's processor time is part of this machine's.
    """

    def __init__(
        self,
        engine: Any,
        remote: Remote,
        region: Region,
        key: RegionKey | None,
        *,
        witness: Witness | None,
        options: dict[str, Any],
        prepared: bool,
        same_host: bool,
        check: bool = True,
    ) -> None:
        self._engine = engine
        self._remote = remote
        self._region = region
        self._key = key
        self._witness = witness
        self._options = options
        self._prepared = prepared
        self._same_host = same_host
        self._check = check
        self._seed = time.time_ns() & 0xFFFFFFFF

    def measure(
        self, case: Case, seconds: float, on_progress: Callable[[float], None] = lambda done: None
    ) -> Measurement:
        """Run one case for about so long, at least one operation per lane.

        Raises:
            BytesDiffer: an operation ended well without its bytes.
            TransferError, TargetEnded, TargetSilent, TargetRefused: it failed.
        """
        try:
            return self._measure(case, seconds, on_progress)
        except (PeerLost, PeerUnknown) as error:
            raise self._ended(str(error)) from error

    def _measure(
        self, case: Case, seconds: float, on_progress: Callable[[float], None]
    ) -> Measurement:
        lanes = placements(case, seed=case.size + case.blocks)
        self._new_bytes(case, lanes)
        posts = [self._post(case, lane) for lane in lanes]
        for post in posts * WARM_OPERATIONS:
            post().wait()
        there, here = self._target_usage(), usage_now()
        latencies, handle = _timed(posts, seconds, on_progress)
        here_after = usage_now()
        there_after = self._target_usage()
        checked = self._look(case, lanes, posts) if self._check else "no"
        return _summary(
            case, handle.backend, np.asarray(latencies),
            here_after.since(here), there_after.since(there),
            checked=checked, same_host=self._same_host, in_process=self._remote.in_process,
        )  # fmt: skip

    def _post(self, case: Case, lane: Placement) -> Post:
        """What the clock sees of one operation: no arithmetic, no conversion."""
        engine, peer, region, key = self._engine, self._remote.peer, self._region, self._key
        options = self._options
        source: Any = lane.source if case.blocks > 1 else int(lane.source[0])
        target: Any = lane.target if case.blocks > 1 else int(lane.target[0])
        lengths: Any = np.full(case.blocks, case.size) if case.blocks > 1 else case.size
        reads = case.operation == "read"
        first, second = (target, source) if reads else (source, target)
        if self._prepared:
            prepare = engine.prepare_read if reads else engine.prepare_write
            post: Post = prepare(peer, region, key, first, second, lengths, **options).post
            return post
        move = engine.read if reads else engine.write
        return lambda: move(peer, region, key, first, second, lengths, **options)

    def _new_bytes(self, case: Case, lanes: list[Placement]) -> None:
        """Put bytes at the source that are nowhere else yet."""
        self._seed = (self._seed * 6364136223846793005 + 1442695040888963407) & 0x7FFFFFFFFFFFFFFF
        for lane in lanes:
            if case.operation == "write":
                fill(self._region.array, lane.source, lane.size, self._seed)
            else:
                self._remote.ask(Fill(_bytes(lane.source), lane.size, self._seed))

    def _look(self, case: Case, lanes: list[Placement], posts: list[Post]) -> str:
        """Operate once more with new bytes, and look for them as soon as the wait returns.

        The first look is at what the clock has seen.
        """
        self._compare(case, lanes)
        for _ in range(LOOKS):
            self._new_bytes(case, lanes)
            for lane, post in zip(lanes, posts, strict=True):
                post().wait()
                self._compare(case, [lane])
        if case.operation == "read":
            return "own"
        return "told" if self._witness is None else "seen"

    def _compare(self, case: Case, lanes: list[Placement]) -> None:
        for lane in lanes:
            if case.operation == "read":
                piece = differing_piece(self._region.array, lane, self._seed)
            elif self._witness is not None:
                piece = differing_piece(self._witness.array, lane, self._seed)
            else:
                request = Compare(_bytes(lane.source), _bytes(lane.target), lane.size, self._seed)
                reply = self._remote.ask(request)
                assert isinstance(reply, Compared), "the target answers with the request's reply"
                piece = None if reply.piece < 0 else reply.piece
            if piece is not None:
                raise BytesDiffer(operation=case.operation, piece=piece, size=shown_size(case.size))

    def _target_usage(self) -> Usage:
        reply = self._remote.ask(Read())
        assert isinstance(reply, Clocks), "the target answers with the request's reply"
        return reply.usage

    def _ended(self, evidence: str) -> TargetEnded:
        if isinstance(self._remote, NotifyRemote):
            return self._remote.ended(evidence)
        return TargetEnded(target="in this process", problem=evidence)


def _timed(
    posts: list[Post], seconds: float, on_progress: Callable[[float], None]
) -> tuple[list[float], Handle]:
    """Keep every lane busy until the time is over; return each operation's seconds."""
    latencies: list[float] = []
    clock = time.perf_counter
    begin = now = clock()
    end, next_report = begin + seconds, begin + 0.1
    if len(posts) == 1:
        post = posts[0]
        while True:
            start = clock()
            handle = post()
            handle.wait()
            now = clock()
            latencies.append(now - start)
            if now >= next_report:
                if now >= end or len(latencies) >= OPERATIONS_MAX:
                    return latencies, handle
                on_progress((now - begin) / seconds)
                next_report = min(now + 0.1, end)
            elif now >= end:
                return latencies, handle
    flying: deque[tuple[float, Handle, Post]] = deque()
    for post in posts:
        flying.append((clock(), post(), post))
    while flying:
        start, handle, post = flying.popleft()
        handle.wait()
        now = clock()
        latencies.append(now - start)
        if now < end and len(latencies) < OPERATIONS_MAX:
            flying.append((clock(), post(), post))
            if now >= next_report:
                on_progress((now - begin) / seconds)
                next_report = now + 0.1
    return latencies, handle


def _summary(
    case: Case,
    backend: str,
    latencies: np.ndarray[Any, np.dtype[np.float64]],
    here: Usage,
    there: Usage,
    *,
    checked: str,
    same_host: bool,
    in_process: bool,
) -> Measurement:
    moved_gb = case.nbytes * len(latencies) / 1e9
    target_s = 0.0 if in_process else there.process_s
    cpu_s = here.process_s + target_s
    others = other_cores(
        here.machine_s, here.process_s + (target_s if same_host else 0.0), here.wall_s
    )
    if not same_host:
        others = max(others, other_cores(there.machine_s, there.process_s, there.wall_s))
    p50, p99, p999 = (float(x) * 1e6 for x in np.percentile(latencies, (50, 99, 99.9)))
    return Measurement(
        operation=case.operation,
        size=case.size,
        blocks=case.blocks,
        batch=case.batch,
        backend=backend,
        operations=len(latencies),
        seconds=here.wall_s,
        gb_s=moved_gb / here.wall_s,
        ops_s=len(latencies) / here.wall_s,
        p50_us=p50,
        p99_us=p99,
        p999_us=p999,
        cpu_s_per_gb=cpu_s / moved_gb,
        cpu_initiator_s=here.process_s,
        cpu_target_s=target_s,
        other_cores=others,
        checked=checked,
    )


def _bytes(offsets: np.ndarray[Any, np.dtype[np.int64]]) -> bytes:
    return offsets.astype("<i8").tobytes()
