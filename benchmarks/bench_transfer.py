"""The transfer engine against Mooncake, NIXL, plain sockets and memcpy, interleaved in one run.

    python -m benchmarks.bench_transfer                          # 12 minutes
    python -m benchmarks.bench_transfer --only tcp --rounds 5

All sides are up at once and take turns, case by case; a ratio is taken within a round. The peers
are installed into an environment of their own at the first use. docs/bench-transfer.md says how
to read the result.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from benchmarks.harness import Recorder
from benchmarks.peer_environment import (
    CompilerMissing,
    PeerEnvironment,
    default_folder,
    peer_environment,
    raw_library,
)
from benchmarks.transfer_bars import (
    Case,
    Figures,
    figure_table,
    paired,
    verdict_table,
    verdicts,
)
from benchmarks.transfer_sides import SideFailed, SideProcess, running
from configs.schema import TransferConfig

PARTS = ("tcp", "shared_memory", "latency", "idle")
OPS = ("write", "read")
BULK = ((64 << 10, 1), (1 << 20, 1), (16 << 20, 1), (256 << 20, 1), (16 << 10, 1000))
CONNECTIONS = TransferConfig().tcp_connections
FIGURES = {
    "gb_s": "GB/s",
    "cpu_s_per_gb": "s/GB",
    "p50_us": "us",
    "p99_us": "us",
    "p999_us": "us",
    "other_cores": "cores",
}
OTHER_CORES_MAX = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A way of using a side."""

    name: str
    side: str
    request: dict[str, object] = field(default_factory=dict)


def cases_of(parts: set[str]) -> list[Case]:
    """Every case of the chosen parts."""
    cases = []
    if "tcp" in parts:
        cases += [Case(transport="tcp", op=op, size=s, blocks=b) for s, b in BULK for op in OPS]
    if "shared_memory" in parts:
        sizes = [pair for pair in BULK if pair[0] != 64 << 10]
        cases += [
            Case(transport="shared_memory", op=op, size=size, blocks=blocks)
            for size, blocks in sizes
            for op in OPS
        ]
    if "latency" in parts:
        cases += [
            Case(transport="tcp", op=op, size=4096, blocks=1, placement=placement)
            for placement in ("free", "apart", "together")
            for op in OPS
        ]
        cases += [Case(transport="shared_memory", op=op, size=4096, blocks=1) for op in OPS]
    return cases


def contestants_of(case: Case) -> list[Contestant]:
    """Who takes part in a case."""
    own = Contestant(name="ours", side=f"ours {case.transport}")
    nixl = Contestant(name="nixl", side=f"nixl {case.transport}")
    if case.transport == "shared_memory":
        memcpy = Contestant(name="memcpy", side="raw", request={"connections": 0})
        prepared = Contestant(name="ours prepared", side=own.side, request={"prepared": True})
        small_write = case.size == 4096 and case.op == "write"
        return [own, *([prepared] if small_write else []), nixl, memcpy]
    counts = (1,) if case.size == 4096 else sorted({1, CONNECTIONS, 4})
    raw = [Contestant(name=f"raw-{n}", side="raw", request={"connections": n}) for n in counts]
    if case.size != 4096:  # for comparison, not for a bar: as our connections within a host are
        reno = {"connections": CONNECTIONS, "congestion": "reno"}
        raw.append(Contestant(name=f"raw-{CONNECTIONS} reno", side="raw", request=reno))
    return [own, Contestant(name="mooncake", side="mooncake"), nixl, *raw]


def sides_of(
    cases: list[Case], environment: PeerEnvironment, library: Path, logs: Path
) -> list[SideProcess]:
    """Start every side that a case needs and that can be imported."""
    wanted = {contestant.side for case in cases for contestant in contestants_of(case)}
    here, peers = Path(sys.executable), environment.python
    known = {
        "ours tcp": (here, "our_transfer.py", "tcp"),
        "ours shared_memory": (here, "our_transfer.py", "shared_memory"),
        "raw": (here, "raw_transfer.py", str(library)),
        "mooncake": (peers, "mooncake_transfer.py"),
        "nixl tcp": (peers, "nixl_transfer.py", "tcp"),
        "nixl shared_memory": (peers, "nixl_transfer.py", "shared_memory"),
    }
    return [
        SideProcess.start(
            name, python, script, *arguments, spins=name.startswith("nixl"), logs=logs
        )
        for name, (python, script, *arguments) in known.items()
        if name in wanted and name.split()[0] not in environment.missing
    ]


def placement_of(case: Case) -> list[set[int]]:
    """Cores of initiator and target."""
    usable = sorted(os.sched_getaffinity(0))
    if case.placement == "free":
        return [set(usable)] * 2
    return [{usable[0]}, {usable[-1] if case.placement == "apart" else usable[0]}]


@dataclass(slots=True)
class Run:
    """Everything that is found."""

    sides: dict[str, SideProcess]
    figures: Figures = field(default_factory=dict)
    failures: dict[tuple[str, str], str] = field(default_factory=dict)
    idle: dict[str, float] = field(default_factory=dict)

    def rounds(self, most: int, cases: list[Case], seconds: float, end: float) -> None:
        """As many rounds as asked for, or as fit before `time.monotonic` is `end`; at least one."""
        longest = 0.0
        for number in range(1, most + 1):
            begin = time.monotonic()
            if number > 1 and begin + longest > end:
                sys.stderr.write(f"no time for more than {number - 1} of {most} rounds\n")
                return
            sys.stderr.write(f"round {number} of {most}\n")
            self.round(number, cases, seconds)
            longest = max(longest, time.monotonic() - begin)

    def round(self, number: int, cases: list[Case], seconds: float) -> None:
        """Each contestant once per case; the order turns around from round to round."""
        for case in cases:
            order = contestants_of(case)
            for contestant in order if number % 2 else reversed(order):
                self._one(number, case, contestant, seconds)

    def look_at_idle(self, seconds: float) -> None:
        """Each side alone, with nothing to do."""
        for name, side in self.sides.items():
            try:
                self.idle[name] = side.idle_cores(seconds)
            except SideFailed as error:
                self.failures[name, "idle"] = str(error)

    def _one(self, number: int, case: Case, contestant: Contestant, seconds: float) -> None:
        side = self.sides.get(contestant.side)
        if side is None:
            self.failures[contestant.side, str(case)] = "not available here"
            return
        request = {"op": case.op, "size": case.size, "blocks": case.blocks, "seconds": seconds}
        try:
            found = side.ask(request | contestant.request, placement_of(case))
        except SideFailed as error:
            self.failures[contestant.name, str(case)] = str(error)
            return
        for figure in FIGURES:
            key = (case, contestant.name, figure)
            self.figures.setdefault(key, {})[number] = found[figure]


def record(run: Run, cases: list[Case]) -> Recorder:
    """All figures, ratios, failures and verdicts, as lines."""
    recorder = Recorder("transfer")
    for (case, name, figure), rounds in run.figures.items():
        labels = {"case": str(case), "side": name}
        if figure == "other_cores":
            continue
        if figure.startswith("p") and case.size != 4096:
            continue  # of few operations a high percentile says nothing
        others = run.figures[case, name, "other_cores"]
        disturbed = sum(value > OTHER_CORES_MAX for value in others.values())
        recorder.add(figure, FIGURES[figure], list(rounds.values()), **labels, disturbed=disturbed)
    for case in cases:
        for contestant in contestants_of(case):
            for figure in ("p50_us", "p99_us") if case.size == 4096 else ("gb_s", "cpu_s_per_gb"):
                ratios = paired(run.figures, case, "ours", contestant.name, figure)
                if ratios and contestant.name != "ours":
                    recorder.add(f"{figure}, ours over theirs", "1", ratios, case=str(case),
                                 side=contestant.name)  # fmt: skip
    for name, cores in run.idle.items():
        recorder.add("idle", "cores", [cores], side=name)
    for (name, case_name), why in run.failures.items():
        recorder.lines.append({"figure": "failure", "side": name, "case": case_name, "said": why})
    for verdict in verdicts(run.figures, cases, CONNECTIONS, run.idle):
        recorder.lines.append(
            {"figure": "bar", "bar": verdict.bar, "case": verdict.case, "value": verdict.ratio,
             "rounds": verdict.rounds, "verdict": verdict.word}
        )  # fmt: skip
    return recorder


def show(run: Run, cases: list[Case]) -> int:
    """Print the tables; return the number of bars that are not met."""
    console = Console(width=max(Console().width, 120))
    names = list(dict.fromkeys(c.name for case in cases for c in contestants_of(case)))
    small = [case for case in cases if case.size == 4096]
    large = [case for case in cases if case.size != 4096]
    for figure, shown in (("gb_s", large), ("cpu_s_per_gb", large), ("p50_us", small),
                          ("p99_us", small)):  # fmt: skip
        if shown:
            console.print(figure_table(run.figures, shown, names, figure))
    for name, cores in run.idle.items():
        console.print(f"idle: {name} uses {cores:.3f} cores")
    for (name, case), why in run.failures.items():
        console.print(f"failed: {name}, {case}: {why}")
    others = [v for (_, _, f), r in run.figures.items() if f == "other_cores" for v in r.values()]
    if others:
        disturbed = sum(value > OTHER_CORES_MAX for value in others)
        console.print(
            f"other work: median {statistics.median(others):.2f} cores; "
            f"{disturbed} of {len(others)} measurements beside more than {OTHER_CORES_MAX}"
        )
    found = list(verdicts(run.figures, cases, CONNECTIONS, run.idle))
    console.print(verdict_table(found))
    return sum(verdict.word != "met" for verdict in found)


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, default=default_folder(),
                        help="The peers' virtual environment; made if not there.")  # fmt: skip
    parser.add_argument("--only", action="append", choices=PARTS, help="A part; may be repeated.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.3, help="Of one measurement.")
    parser.add_argument("--minutes", type=float, default=11.0,
                        help="No round is begun that would not end within this time.")  # fmt: skip
    parser.add_argument("--no-record", action="store_true", help="Leave the results file alone.")
    options = parser.parse_args()
    begin = time.monotonic()
    parts = set(options.only or PARTS)
    cases = cases_of(parts)
    needed = cases or cases_of({"tcp", "shared_memory"})
    with tempfile.TemporaryDirectory() as folder:
        environment = peer_environment(options.peers)
        try:
            library = raw_library(Path(folder))
        except CompilerMissing as error:
            parser.exit(1, f"{error}\n")
        for name, why in environment.missing.items():
            sys.stderr.write(f"{name} is left out: {why}\n")
        with running(sides_of(needed, environment, library, Path(folder))) as sides:
            run = Run(sides)
            if "idle" in parts:
                run.look_at_idle(2.0)
            if cases:
                run.rounds(options.rounds, cases, options.seconds, begin + options.minutes * 60)
    show(run, cases)
    if not options.no_record:
        record(run, cases).write()


if __name__ == "__main__":
    main()
