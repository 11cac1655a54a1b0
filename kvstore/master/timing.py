"""The master's durations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterTiming:
    """The master's durations, in seconds.

    Attributes:
        lease_s: How long bytes found by a lookup stay in place.
        silence_s: A node silent for this long is dropped until it registers again.
        put_s: A put may take this long from allocation to commit. Also how long a segment that
            writers knew before (under another master) is not allocated from.
        soft_pin_s: How long a soft pin lasts if nobody says.
        heartbeat_s: How often each node speaks: an idle master hears nothing for so long.
    """

    lease_s: float = 10.0
    silence_s: float = 10.0
    put_s: float = 30.0
    soft_pin_s: float = 1800.0
    heartbeat_s: float = 0.0
