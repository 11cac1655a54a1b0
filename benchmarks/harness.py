"""One way to record a figure: JSON lines that carry the command, the commit and the machine.

A record is refused without samples; medians of fewer than five samples are marked as such.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
# What one benchmark records changes nothing that the next one measures.
CHANGED = ("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")


def machine() -> dict[str, object]:
    """Processor, cores, memory, the GPU if there is one, and the versions that matter."""
    import torch

    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **gpu,
    }


def commit() -> str:
    """The commit measured, with `+changes` when tracked files but results differ from it.

    `unknown` where the files were copied without their history.
    """
    try:
        sha = _git("rev-parse", "--short=12", "HEAD")
        dirty = _git(*CHANGED)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "unknown"
    return sha + ("+changes" if dirty else "")


def summary(samples: list[float]) -> dict[str, float | int]:
    """Median, 10th and 90th percentile, extremes and count."""
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    return {
        "median": statistics.median(ordered),
        "p10": ordered[round(0.1 * (len(ordered) - 1))],
        "p90": ordered[round(0.9 * (len(ordered) - 1))],
        "min": ordered[0],
        "max": ordered[-1],
        "samples": len(ordered),
    }


@dataclass(slots=True)
class Recorder:
    """Collects the lines of one benchmark and writes them to `results/<name>.jsonl`."""

    name: str
    lines: list[dict[str, object]] = field(default_factory=list)

    def add(self, what: str, unit: str, samples: list[float], **labels: object) -> None:
        """Add one figure; it is shown on standard error at once."""
        figures = {key: round(value, 4) for key, value in summary(samples).items()}
        self.lines.append({"figure": what, "unit": unit, **labels, **figures})
        sys.stderr.write(json.dumps(self.lines[-1]) + "\n")

    def write(self) -> Path:
        """Write the header line and the figures, replacing an earlier run's file."""
        header = {
            "benchmark": self.name,
            "command": _command(),
            "commit": commit(),
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "machine": machine(),
        }
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{self.name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in (header, *self.lines)))
        return path


def _command() -> str:
    """The command to repeat it; of absolute paths only the last part, they are this machine's."""
    module = f"benchmarks.{Path(sys.argv[0]).stem}"
    arguments = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return shlex.join(["python", "-m", module, *arguments])


def _git(*arguments: str) -> str:
    result = subprocess.run(
        ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return result.stdout.strip()


def _processor() -> str:
    """Its name with family and model: a virtual machine's name alone tells no generation."""
    known: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        known.setdefault(name.strip(), value.strip())
    if "model name" not in known:
        return platform.processor()
    if "cpu family" not in known:
        return known["model name"]
    return f"{known['model name']} (family {known['cpu family']}, model {known['model']})"
