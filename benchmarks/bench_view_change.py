"""How long a SIGKILL stops a group: from the signal until the last survivor has the next view.

Run from the repository: `python -m benchmarks.bench_view_change --samples 12`. Four processes on
one host exchange a message per round, the experts are tiny, and a warm-up group is not counted.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
from pathlib import Path

from benchmarks.harness import Recorder
from tests.support.worker_group import Group


def one_death(world_size: int, victim_rank: int) -> tuple[float, float]:
    """Return milliseconds until the last survivor knew the next view, and had it installed."""
    with tempfile.TemporaryDirectory() as folder:
        group = Group(Path(folder), world_size)
        try:
            names = [group.start(rank) for rank in range(world_size)]
            group.installed(names, list(range(world_size)))
            group.serving(names)
            time.sleep(0.5)
            rest = [name for name in names if name != names[victim_rank]]
            ranks = [rank for rank in range(world_size) if rank != victim_rank]
            killed_at = group.signal(names[victim_rank], signal.SIGKILL)
            time.sleep(0.5)  # reading their logs meanwhile would take their cores
            installed_at = group.installed(rest, ranks)
            epoch = group.epoch()
            known = [e["t"] for n in rest for e in group.events(n, "committed", epoch=epoch)]
            return (max(known) - killed_at) * 1e3, (installed_at - killed_at) * 1e3
        finally:
            group.close()


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args()
    one_death(options.workers, 0)
    found = [one_death(options.workers, i % options.workers) for i in range(options.samples)]
    recorder = Recorder("view_change")
    recorder.add("view known", "ms", [known for known, _ in found], workers=options.workers)
    recorder.add("view installed", "ms", [done for _, done in found], workers=options.workers)
    recorder.write()


if __name__ == "__main__":
    main()
