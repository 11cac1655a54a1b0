"""What the sprayer knows about one rail: health, measured bandwidth, what is under way. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from transfer.rails.books import LoadLike, make_load
from transfer.rails.bulk import URGENT_MEMORY_S, bulk_bytes_max
from transfer.rails.rail import RailName, RailState
from transfer.rails.slices import Slice
from transfer.statistics import RailStatistics

# Taken for true until something was measured: high, so that an unknown rail is tried.
BANDWIDTH_GUESS: Final = 1e9
# A sample spans at least so many bytes and seconds, or it would measure latency.
SAMPLE_BYTES: Final = 256 << 10
SAMPLE_S: Final = 2e-3
SAMPLE_WEIGHT: Final = 0.3
# Without any completion for so long, while bytes are out, a rail is stalled.
STALL_S: Final = 0.03
STALL_S_MAX: Final = 1.0
# What moves again so soon had not failed. Later, a cable may have been plugged in again.
FALSE_ALARM_S: Final = 0.2
# Without a false alarm for so long, half of the patience gained by the last one is enough.
CALM_S: Final = 1.0
# Where the link has to end for it, a false alarm costs more: patience begins here, and doubles.
STALL_S_ENDING: Final = 0.2
# Bulk that gives way moves every 40 to 90 ms, perhaps over another rail.
STALL_S_GIVING_WAY: Final = 0.5
# A slow rail is given so many times the time that a slice should take on it.
STALL_SLICES: Final = 8
BACKOFF_S: Final = 0.05
BACKOFF_S_MAX: Final = 2.0


@dataclass(slots=True, kw_only=True, eq=False)
class RailRecord:
    """One rail. Changed by the sprayer's core only.

    Attributes:
        idx: its place among the peer's rails.
        name: which way; None until it was open once.
        load: what the books know about it: whether it may be used, and how busy it is.
        opening: whether one is being made.
        repeats: whether its slices may be sent elsewhere while they are still under way here.
        state: its health; changed by `become`.
        out: slices under way, in order of posting.
        bandwidth: estimate, bytes/s; `measured` tells whether it is more than a guess.
        pace: the same, but not lowered by what bulk had while it gave way to urgent traffic.
        measured_at: time of the last sample, or of the last try to get one.
        progressed_at: time of the last completion, or of the post that ended its idleness.
        cooling_until: when it may be opened, or tried, again.
        stall_s: its patience; grows if a stall was a false alarm, and comes back to
            `stall_s_min` in time.
        alarmed_at: time of the last such change.
        cooled_at: when it was taken out of use last.
        failed_at, evidence: when and why it failed last.
        bytes_done, slices_done, failures, retries: totals; a retry is a slice it lost.
    """

    idx: int
    name: RailName | None = None
    load: LoadLike = field(default_factory=make_load)
    opening: bool = False
    repeats: bool = True
    state: RailState = RailState.HEALTHY
    out: dict[Slice, None] = field(default_factory=dict)
    bandwidth: float = BANDWIDTH_GUESS
    pace: float = BANDWIDTH_GUESS
    measured: bool = False
    measured_at: float = 0.0
    progressed_at: float = 0.0
    cooling_until: float = 0.0
    backoff_s: float = BACKOFF_S
    stall_s: float = STALL_S
    stall_s_min: float = STALL_S
    alarmed_at: float = 0.0
    cooled_at: float = float("-inf")
    stalled: bool = False
    bytes_done: int = 0
    slices_done: int = 0
    failures: int = 0
    failed_at: float = 0.0
    evidence: str = ""
    retries: int = 0
    sample_bytes: int = 0
    sample_start: float = 0.0

    def __post_init__(self) -> None:
        self.load.healthy = True
        self._tell_bandwidth()

    @property
    def is_open(self) -> bool:
        """Whether a link stands."""
        return self.load.open

    @is_open.setter
    def is_open(self, value: bool) -> None:
        self.load.open = value

    @property
    def out_bytes(self) -> int:
        """Bytes under way, in slices and in messages."""
        return self.load.out_bytes

    @property
    def urgent_bytes(self) -> int:
        """Those of the urgent among them."""
        return self.load.urgent_bytes

    @property
    def is_unsettled(self) -> bool:
        """Whether a link is being made, is to be made again, or has yet to prove itself."""
        if self.opening or self.stalled:
            return True
        return self.name is not None and not (self.is_open and self.state is RailState.HEALTHY)

    def become(self, state: RailState) -> None:
        """Change its health."""
        self.state = state
        self.load.healthy = state is RailState.HEALTHY

    @property
    def usable(self) -> bool:
        """Whether slices may be posted now."""
        if not self.is_open or self.state is RailState.COOLING:
            return False
        return self.state is RailState.HEALTHY or not self.out

    def post(self, part: Slice, now: float) -> None:
        """Note that a slice is under way."""
        if not self.out:
            self.progressed_at = self.sample_start = now
            self.sample_bytes = 0
        self.out[part] = None
        self.load.add(part.nbytes, part.urgent)

    def forget(self, part: Slice) -> bool:
        """Note that a slice is not under way any more; False if it was not."""
        if part not in self.out:
            return False
        del self.out[part]
        self.load.add(-part.nbytes, part.urgent)
        return True

    def complete(self, part: Slice, now: float, *, gave_way: bool = False) -> None:
        """A slice came to its end over this rail: it is well. `gave_way`: to urgent traffic."""
        if not self.forget(part):
            return
        self.slices_done += 1
        self.bytes_done += part.nbytes
        self.progressed_at = now
        if self.stalled:  # only late: be more patient with it
            self.stalled = False
            if now - self.cooled_at < FALSE_ALARM_S:
                self.stall_s = min(2 * self.stall_s, STALL_S_MAX)
                self.alarmed_at = now
        elif self.stall_s > self.stall_s_min and now - self.alarmed_at > CALM_S:
            self.stall_s = max(self.stall_s / 2, self.stall_s_min)
            self.alarmed_at = now
        self.become(RailState.HEALTHY)
        self.backoff_s = BACKOFF_S
        self._measure(part.nbytes, now, gave_way)

    def cool(self, now: float) -> list[Slice]:
        """Take it out of use for a while; returns what was under way.

        A link that stands keeps its slices: they may yet come to their end.
        """
        self.failures += 1
        self.cooled_at = now
        self.failed_at = now
        self.become(RailState.COOLING)
        self.cooling_until = now + self.backoff_s
        self.backoff_s = min(2 * self.backoff_s, BACKOFF_S_MAX)
        return list(self.out)

    def suspect(self) -> None:
        """Note that it has stalled. If its link has to end for that, be more patient next time."""
        self.stalled = True
        if not self.repeats:
            self.stall_s = min(2 * self.stall_s, STALL_S_MAX)

    def is_silent(self, now: float, *, gives_way: bool = False) -> bool:
        """Whether bytes are out and nothing has come to its end for too long.

        Args:
            now: The time.
            gives_way: Bulk waits for its turns beside urgent traffic: where there is nothing else
                it is no fault of the rail that nothing moves.
        """
        if not self.out or not self.is_open:
            return False
        smallest = min(part.nbytes for part in self.out)
        patience = max(self.stall_s, STALL_SLICES * smallest / self.bandwidth)
        if gives_way and not self.urgent_bytes:
            patience = max(patience, STALL_S_GIVING_WAY)
        return now - max(self.progressed_at, self.load.progressed_at) > patience

    def statistics(self, peer: str) -> RailStatistics:
        """Return what can be told about it."""
        return RailStatistics(
            peer=peer,
            rail=str(self.name),
            state=self.state.value,
            open=self.is_open,
            bytes=self.bytes_done + self.load.bytes_done,
            slices=self.slices_done + self.load.messages_done,
            bandwidth=self.bandwidth if self.measured else 0.0,
            failures=self.failures,
            retries=self.retries,
            bytes_in_flight=self.out_bytes,
            evidence=self.evidence,
            failed_at=self.failed_at,
        )

    def _measure(self, nbytes: int, now: float, gave_way: bool) -> None:
        self.sample_bytes += nbytes
        elapsed_s = now - self.sample_start
        if self.sample_bytes < SAMPLE_BYTES or (elapsed_s < SAMPLE_S and self.measured):
            return
        sample = self.sample_bytes / max(elapsed_s, 1e-6)
        weight = SAMPLE_WEIGHT if self.measured else 1.0
        self.bandwidth += weight * (sample - self.bandwidth)
        if not gave_way or sample > self.pace or not self.measured:
            self.pace += weight * (sample - self.pace)
        self.measured, self.measured_at = True, now
        self._tell_bandwidth()
        self.sample_start, self.sample_bytes = now, 0

    def _tell_bandwidth(self) -> None:
        load, bandwidth = self.load, self.bandwidth
        load.bandwidth = bandwidth
        load.bulk_bytes_max = int(bulk_bytes_max(bandwidth, URGENT_MEMORY_S))
        load.bulk_bytes_max_beside_urgent = int(bulk_bytes_max(bandwidth, 0.0))
