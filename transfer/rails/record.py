"""What the sprayer knows about one rail: health, measured bandwidth, what is under way. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

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
        open: whether a link stands.
        opening: whether one is being made.
        repeats: whether its slices may be sent elsewhere while they are still under way here.
        state: its health.
        out: slices under way, in order of posting.
        out_bytes: their bytes.
        urgent_bytes: those of the urgent among them.
        bandwidth: estimate, bytes/s; `measured` tells whether it is more than a guess.
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
    open: bool = False
    opening: bool = False
    repeats: bool = True
    state: RailState = RailState.HEALTHY
    out: dict[Slice, None] = field(default_factory=dict)
    out_bytes: int = 0
    urgent_bytes: int = 0
    bandwidth: float = BANDWIDTH_GUESS
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

    @property
    def usable(self) -> bool:
        """Whether slices may be posted now."""
        if not self.open or self.state is RailState.COOLING:
            return False
        return self.state is RailState.HEALTHY or not self.out

    def post(self, part: Slice, now: float) -> None:
        """Note that a slice is under way."""
        if not self.out:
            self.progressed_at = self.sample_start = now
            self.sample_bytes = 0
        self.out[part] = None
        self.out_bytes += part.nbytes
        if part.urgent:
            self.urgent_bytes += part.nbytes

    def carry(self, nbytes: int, urgent: bool) -> None:
        """Note bytes under way that are in no slice."""
        self.out_bytes += nbytes
        if urgent:
            self.urgent_bytes += nbytes

    def drop(self, nbytes: int, urgent: bool) -> None:
        """Note that such bytes are not under way any more."""
        self.out_bytes -= nbytes
        if urgent:
            self.urgent_bytes -= nbytes

    def forget(self, part: Slice) -> bool:
        """Note that a slice is not under way any more; False if it was not."""
        if part not in self.out:
            return False
        del self.out[part]
        self.out_bytes -= part.nbytes
        if part.urgent:
            self.urgent_bytes -= part.nbytes
        return True

    def complete(self, part: Slice, now: float) -> None:
        """A slice came to its end over this rail: it is well."""
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
        self.state = RailState.HEALTHY
        self.backoff_s = BACKOFF_S
        self._measure(part.nbytes, now)

    def cool(self, now: float) -> list[Slice]:
        """Take it out of use for a while; returns what was under way.

        A link that stands keeps its slices: they may yet come to their end.
        """
        self.failures += 1
        self.cooled_at = now
        self.failed_at = now
        self.state = RailState.COOLING
        self.cooling_until = now + self.backoff_s
        self.backoff_s = min(2 * self.backoff_s, BACKOFF_S_MAX)
        return list(self.out)

    def suspect(self) -> None:
        """Note that it has stalled. If its link has to end for that, be more patient next time."""
        self.stalled = True
        if not self.repeats:
            self.stall_s = min(2 * self.stall_s, STALL_S_MAX)

    def is_silent(self, now: float) -> bool:
        """Whether bytes are out and nothing has come to its end for too long."""
        if not self.out or not self.open:
            return False
        smallest = min(part.nbytes for part in self.out)
        patience = max(self.stall_s, STALL_SLICES * smallest / self.bandwidth)
        return now - self.progressed_at > patience

    def statistics(self, peer: str) -> RailStatistics:
        """Return what can be told about it."""
        return RailStatistics(
            peer=peer,
            rail=str(self.name),
            state=self.state.value,
            open=self.open,
            bytes=self.bytes_done,
            slices=self.slices_done,
            bandwidth=self.bandwidth if self.measured else 0.0,
            failures=self.failures,
            retries=self.retries,
            bytes_in_flight=self.out_bytes,
            evidence=self.evidence,
            failed_at=self.failed_at,
        )

    def _measure(self, nbytes: int, now: float) -> None:
        self.sample_bytes += nbytes
        elapsed_s = now - self.sample_start
        if self.sample_bytes < SAMPLE_BYTES or (elapsed_s < SAMPLE_S and self.measured):
            return
        sample = self.sample_bytes / max(elapsed_s, 1e-6)
        weight = SAMPLE_WEIGHT if self.measured else 1.0
        self.bandwidth += weight * (sample - self.bandwidth)
        self.measured, self.measured_at = True, now
        self.sample_start, self.sample_bytes = now, 0
