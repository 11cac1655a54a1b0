"""What a worker tells the front about its part of the dispatch, with each `Load` message."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch import LoadWindow

if TYPE_CHECKING:
    from dispatch import Dispatcher, ExpertLoad
    from dispatch.statistics import DispatchStatistics


class DispatchLoad:
    """Reads the dispatcher's totals between passes. Not thread-safe.

    Args:
        dispatcher: Not owned.
        rank: This rank.
    """

    def __init__(self, dispatcher: Dispatcher, rank: int) -> None:
        self._dispatcher = dispatcher
        self._window = LoadWindow(rank)
        self._statistics: DispatchStatistics | None = None

    def update(self, now: float) -> ExpertLoad:
        """Take the totals; return the load of this rank's experts, for placement.

        Args:
            now: Seconds, monotonic.
        """
        self._statistics = self._dispatcher.statistics()
        return self._window.update(self._statistics, now)

    def counters(self) -> dict[str, float]:
        """Return totals as of the last `update`; the front sums them over workers and lives."""
        found = self._statistics
        if found is None:
            return {}
        return {
            "dispatch_choices": float(found.routed.sum()),
            "dispatch_rows_received": float(found.received.sum()),
            "dispatch_bytes_sent": float(found.sent_bytes),
            "dispatch_waited_s": found.waited_s,
            "dispatch_windows_grown": float(found.grown_windows),
            "dispatch_choices_degraded": float(found.degraded_choices),
        }

    @staticmethod
    def gauges(load: ExpertLoad) -> dict[str, float]:
        """Return what is true of this rank now; one number each, however many experts it has."""
        return {
            "dispatch_rows_per_s": load.rows_per_s(),
            "expert_load_ratio": load.hottest_ratio(),
        }
