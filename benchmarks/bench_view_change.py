"""How long a SIGKILL stops a group: from the signal until the last survivor has the next view.

Run from the repository: `python -m benchmarks.bench_view_change --samples 12`. Four processes on
one host exchange a message per round, the experts are tiny, and a warm-up group is not counted.
Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path

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


def summary(samples: list[float]) -> dict[str, float]:
    deciles = statistics.quantiles(samples, n=10)
    figures = {"p10": deciles[0], "median": statistics.median(samples), "p90": deciles[-1]}
    return {name: round(value, 1) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args()
    one_death(options.workers, 0)
    found = [one_death(options.workers, i % options.workers) for i in range(options.samples)]
    line = {
        "benchmark": "view_change_after_sigkill",
        "unit": "ms",
        "workers": options.workers,
        "samples": options.samples,
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "agreed": summary([agreed for agreed, _ in found]),
        "installed": summary([installed for _, installed in found]),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
