"""A table for people, JSON lines for machines."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import moe_runtime
from moe_runtime.bench.workload import shown_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from moe_runtime.bench.measuring import Measurement

OTHER_CORES_MAX = 0.2
TABLE_WIDTH_MIN = 132
COLUMNS = (
    "size", "blocks", "op", "backend", "GB/s", "op/s", "p50 us", "p99 us", "p99.9 us",
    "CPU s/GB", "other cores", "check",
)  # fmt: skip


def table(measurements: list[Measurement]) -> Table:
    """The rows as a table; docs/bench-transfer.md explains the columns."""
    shown = Table(title="moe-runtime bench transfer", title_justify="left")
    for column in COLUMNS:
        words = column in ("op", "backend", "check")
        shown.add_column(column, justify="left" if words else "right", no_wrap=True)
    for row in measurements:
        busy = row.other_cores > OTHER_CORES_MAX
        shown.add_row(
            shown_size(row.size),
            str(row.blocks) if row.batch == 1 else f"{row.blocks} x{row.batch}",
            row.operation,
            row.backend,
            f"{row.gb_s:.3f}",
            f"{row.ops_s:.0f}" if row.ops_s >= 10 else f"{row.ops_s:.2f}",
            f"{row.p50_us:.1f}",
            f"{row.p99_us:.1f}",
            f"{row.p999_us:.1f}",
            f"{row.cpu_s_per_gb:.3f}",
            f"{row.other_cores:.2f}" + (" !" if busy else ""),
            row.checked,
        )
    return shown


def print_table(measurements: list[Measurement]) -> None:
    """Print it, on standard output, never narrower than its columns."""
    Console(width=max(Console().width, TABLE_WIDTH_MIN)).print(table(measurements))


def header() -> dict[str, object]:
    """The first JSON line: what was run, of which commit, where."""
    return {
        "benchmark": "bench transfer",
        "command": shlex.join(["moe-runtime", *map(_portable, sys.argv[1:])]),
        "commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "kernel": platform.release(),
            "python": platform.python_version(),
        },
    }


def json_line(fields: dict[str, object]) -> str:
    """One object a line."""
    return json.dumps(fields) + "\n"


@contextmanager
def progress(total: int) -> Iterator[Callable[[str, int, float], None]]:
    """Show a bar on standard error on a terminal; yields `report(what, finished, part)`."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal,
                   auto_refresh=False)  # fmt: skip
    with bar:
        task = bar.add_task("", total=total)

        def report(what: str, finished: int, part: float) -> None:
            bar.update(task, description=what, completed=finished + min(part, 1.0), refresh=True)

        yield report


def _portable(word: str) -> str:
    """Of absolute paths only the last part: they are this machine's."""
    option, equals, value = word.rpartition("=")
    return option + equals + (Path(value).name if value.startswith("/") else value)


def _commit() -> str:
    """The commit of the checkout that this runs from; the version where it is none."""
    home = Path(moe_runtime.__file__).resolve().parents[1]
    if not (home / ".git").exists():
        return f"version {moe_runtime.__version__}"
    try:
        sha = _git(home, "rev-parse", "--short=12", "HEAD")
        changed = _git(home, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return f"version {moe_runtime.__version__}"
    return sha + ("+changes" if changed else "")


def _git(home: Path, *arguments: str) -> str:
    result = subprocess.run(
        ["git", *arguments], cwd=home, capture_output=True, text=True, check=True, timeout=10
    )
    return result.stdout.strip()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
