"""Two rails: activations beside a bulk transfer, and a rail that is cut in mid-transfer.

    python -m benchmarks.bench_transfer_rails --rounds 7

Needs root and `ip`: initiator and target get a network namespace each, with two cables between
them, so that a rail can be cut as a switch port that dies does: no reset, no notice, silence.

    namespace A   rail0 10.90.0.1 ======== 10.90.0.2 rail0   namespace B
    initiator     rail1 10.90.1.1 ======== 10.90.1.2 rail1   target

Activations: writes of 4 to 32 KiB one after another, and of 64 KiB to 1 MiB with gaps, as a step of
a model leaves them; quiet and then beside writes of 32 MiB of class WEIGHTS, two in flight.
What bulk moves while they come is read off the cables, beside what it moved in all. Cut: writes of
1 MiB, eight in flight; one rail goes down for two seconds. The stall is the longest time in which
nothing completed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness import Recorder
from configs.schema import TransferBackend, TransferConfig
from moe_runtime.bench.remote import NotifyRemote, fresh_secret, open_window, target_process
from transfer import (
    Priority,
    Region,
    RegionKey,
    Transfer,
    TransferEngine,
    TransferError,
    allocate,
)

RAILS = 2
INSIDE_VARIABLE = "BENCH_RAILS_TARGET_NAMESPACE"
WINDOW_BYTES = 128 << 20
ACTIVATION_BYTES = (4 << 10, 8 << 10, 16 << 10, 32 << 10)
# Bytes, and microseconds of the gap behind each, half as long to one and a half times.
PACED = ((64 << 10, 200), (256 << 10, 300), (1 << 20, 500))
BULK_BYTES = 32 << 20
BULK_OFFSET = 64 << 20
CUT_BYTES = 1 << 20
CUT_IN_FLIGHT = 8
CUT_DOWN_S = 2.0
RETURN_S_MAX = 30.0
STALL_S_MAX = 0.1
P99_RATIO_MAX = 1.2


def ip(*arguments: str) -> None:
    """Run one `ip` command."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@contextlib.contextmanager
def two_namespaces(rate_mbit: int | None) -> Iterator[tuple[str, str]]:
    """Make two namespaces with two cables between them; remove them at the end."""
    ends = tuple(f"rails-{os.getpid()}-{side}" for side in "ab")
    made: list[str] = []
    try:
        for name in ends:
            ip("netns", "add", name)
            made.append(name)
            ip("-n", name, "link", "set", "lo", "up")
        for rail in range(RAILS):
            ip("-n", ends[0], "link", "add", f"rail{rail}", "type", "veth",
               "peer", "name", f"rail{rail}", "netns", ends[1])  # fmt: skip
            for number, name in enumerate(ends, 1):
                ip("-n", name, "addr", "add", f"10.90.{rail}.{number}/30", "dev", f"rail{rail}")
                ip("-n", name, "link", "set", f"rail{rail}", "up")
                if rate_mbit is not None:
                    subprocess.run(
                        ["tc", "-n", name, "qdisc", "add", "dev", f"rail{rail}", "root", "tbf",
                         "rate", f"{rate_mbit}mbit", "burst", "256k", "latency", "20ms"],
                        check=True, capture_output=True, timeout=20,
                    )  # fmt: skip
        yield ends[0], ends[1]
    finally:
        for name in made:
            ip("netns", "delete", name)


def config(side: int) -> TransferConfig:
    """Of the engine whose addresses end in `side`."""
    rails = tuple(f"10.90.{rail}.{side}" for rail in range(RAILS))
    return TransferConfig(host=rails[0], rails=rails, backend=TransferBackend.TCP)


@dataclass(slots=True)
class Pair:
    """An engine and a target's window."""

    engine: TransferEngine
    peer: str
    region: Region
    key: RegionKey

    def write(self, offset: int, nbytes: int, priority: Priority) -> Transfer:
        return self.engine.write(
            self.peer, self.region, self.key, offset, offset, nbytes, priority=priority
        )


@contextlib.contextmanager
def pair(namespace: str) -> Iterator[Pair]:
    """Open both ends."""
    secret = fresh_secret()
    prefix = ("ip", "netns", "exec", namespace)
    engine = TransferEngine(config(1), name=secrets.token_hex(8), secret=secret)
    with target_process(config(2), secret, None, prefix) as target:
        remote = NotifyRemote(engine, ending=target.ending)
        with engine:
            remote.bind(engine.connect(target.address))
            region = engine.register(allocate(WINDOW_BYTES))
            key, _ = open_window(remote, WINDOW_BYTES, private=False)
            yield Pair(engine, remote.peer, region, key)


class Bulk:
    """Writes of class WEIGHTS on a thread of their own, two in flight, until stopped."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._stopping = False
        self._moved = 0
        self._begin = 0.0
        self._error: TransferError | None = None
        self.gb_s = 0.0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Bulk:
        self._begin = time.perf_counter()
        self._thread.start()
        time.sleep(0.3)  # until the rails are full
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping = True
        self._thread.join()
        self.gb_s = self._moved / (time.perf_counter() - self._begin) / 1e9
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._move()
        except TransferError as error:
            self._error = error

    def _move(self) -> None:
        flying: deque[Transfer] = deque()
        while not self._stopping or flying:
            while len(flying) < 2 and not self._stopping:
                flying.append(self._pair.write(BULK_OFFSET, BULK_BYTES, Priority.WEIGHTS))
            flying.popleft().wait()
            self._moved += BULK_BYTES


def sent_bytes() -> int:
    """Bytes that have left over the cables."""
    counters = (Path(f"/sys/class/net/rail{rail}/statistics/tx_bytes") for rail in range(RAILS))
    return sum(int(counter.read_text()) for counter in counters)


def activations(pair: Pair, nbytes: int, gap_us: int, seconds: float) -> tuple[list[float], float]:
    """Microseconds of writes, and GB/s of whatever else left over the cables meanwhile."""
    for _ in range(20):
        pair.write(0, nbytes, Priority.ACTIVATIONS).wait()
    found, before, begin = [], sent_bytes(), time.perf_counter()
    while (start := time.perf_counter()) < begin + seconds:
        pair.write(0, nbytes, Priority.ACTIVATIONS).wait()
        found.append((time.perf_counter() - start) * 1e6)
        if gap_us:
            time.sleep(gap_us * 1e-6 * random.uniform(0.5, 1.5))
    others = sent_bytes() - before - nbytes * len(found)
    return found, others / (time.perf_counter() - begin) / 1e9


class Streams:
    """Figures of streams of activations, by bytes, gap and load, a round's after the other."""

    def __init__(self, pair: Pair, seconds: float) -> None:
        self._pair, self._seconds = pair, seconds
        self.bulk_gb_s: list[float] = []
        self.latencies: dict[tuple[int, int, str, str], list[float]] = {}
        self.slow: dict[tuple[int, int, str], list[float]] = {}
        self.beside_gb_s: dict[tuple[int, int], list[float]] = {}

    def measure(self, nbytes: int, gap_us: int, what: str) -> None:
        """One stream, "quiet" or "beside" bulk."""
        with contextlib.ExitStack() as stack:
            bulk = stack.enter_context(Bulk(self._pair)) if what == "beside" else None
            found, others = activations(self._pair, nbytes, gap_us, self._seconds)
        if bulk is not None:
            self.bulk_gb_s.append(bulk.gb_s)
            self.beside_gb_s.setdefault((nbytes, gap_us), []).append(others)
        for name, share in (("p50", 50), ("p99", 99)):
            key = (nbytes, gap_us, what, name)
            self.latencies.setdefault(key, []).append(float(np.percentile(found, share)))
        # A p99 jumps where one in a hundred is slow; how many are does not.
        slow = float(np.mean(np.array(found) > 2 * np.median(found)))
        self.slow.setdefault((nbytes, gap_us, what), []).append(100 * slow)

    def record(self, recorder: Recorder) -> None:
        """All of them, then the ratios with their bars."""
        recorder.add("bulk beside activations", "GB/s", self.bulk_gb_s)
        for (nbytes, gap_us), rates in self.beside_gb_s.items():
            recorder.add("bulk while activations come", "GB/s", rates, **stream(nbytes, gap_us))
        for (nbytes, gap_us, what, name), values in self.latencies.items():
            facts = stream(nbytes, gap_us)
            recorder.add(f"activation {name}", "us", values, load=what, **facts)
        for (nbytes, gap_us, what), values in self.slow.items():
            facts = stream(nbytes, gap_us)
            recorder.add("activations slower than twice p50", "%", values, load=what, **facts)
        for nbytes, gap_us in self.beside_gb_s:
            self._record_ratios(recorder, nbytes, gap_us)

    def _record_ratios(self, recorder: Recorder, nbytes: int, gap_us: int) -> None:
        for name in ("p50", "p99"):
            beside, quiet = (
                self.latencies[nbytes, gap_us, what, name] for what in ("beside", "quiet")
            )
            ratios = [a / b for a, b in zip(beside, quiet, strict=True)]
            facts = stream(nbytes, gap_us)
            recorder.add(f"activation {name}, beside over quiet", "1", ratios, **facts)
        gaps = f" every {gap_us} us" if gap_us else ""
        verdict(recorder, f"{nbytes >> 10} KiB{gaps} beside bulk, p99 over quiet p99",
                P99_RATIO_MAX, statistics.median(ratios))  # fmt: skip


def stream(nbytes: int, gap_us: int) -> dict[str, int]:
    """Which one it is, for a line of the results."""
    return {"bytes": nbytes, "gap_us": gap_us} if gap_us else {"bytes": nbytes}


def measure_activations(pair: Pair, recorder: Recorder, rounds: int, seconds: float) -> None:
    """Quiet and beside bulk, in turns."""
    streams = Streams(pair, seconds)
    for number in range(rounds):
        for nbytes, gap_us in (*((nbytes, 0) for nbytes in ACTIVATION_BYTES), *PACED):
            for what in ("quiet", "beside") if number % 2 else ("beside", "quiet"):
                streams.measure(nbytes, gap_us, what)
    streams.record(recorder)


def cut_once(pair: Pair, rail: int, seconds: float) -> tuple[float, int, int]:
    """Return the longest stall in seconds, failed and all operations."""
    flying: deque[Transfer] = deque()
    failed = operations = 0
    longest, last = 0.0, time.perf_counter()
    cut, mend = last + seconds, last + seconds + CUT_DOWN_S
    end, state = mend + seconds, "up"
    while (now := time.perf_counter()) < end or flying:
        if state == "up" and now >= cut:
            set_rail(rail, up=False)
            state = "down"
        elif state == "down" and now >= mend:
            set_rail(rail, up=True)
            state = "mended"
        while len(flying) < CUT_IN_FLIGHT and now < end:
            offset = operations % CUT_IN_FLIGHT * CUT_BYTES
            flying.append(pair.write(offset, CUT_BYTES, Priority.WEIGHTS))
            operations += 1
        try:
            flying.popleft().wait()
        except TransferError as error:
            failed += 1
            sys.stderr.write(f"failed: {error}\n")
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest, failed, operations


def set_rail(rail: int, *, up: bool) -> None:
    """Plug one cable in or out."""
    ip("link", "set", f"rail{rail}", "up" if up else "down")


def until_healthy(pair: Pair) -> float:
    """Seconds until traffic has brought every rail back."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < RETURN_S_MAX:
        pair.write(0, 8 * CUT_BYTES, Priority.WEIGHTS).wait()
        if all(rail.state == "healthy" for rail in pair.engine.statistics().rails):
            return time.perf_counter() - begin
        time.sleep(0.05)
    raise RuntimeError(f"a rail did not return: {pair.engine.statistics().rails}")


def measure_cuts(pair: Pair, recorder: Recorder, rounds: int, seconds: float) -> None:
    """Cut each rail in turn."""
    stalls, failures, returns = [], [], []
    for number in range(rounds):
        stall, failed, operations = cut_once(pair, number % RAILS, seconds)
        returns.append(until_healthy(pair))
        stalls.append(stall * 1e3)
        failures.append(float(failed))
        sys.stderr.write(f"cut {number}: {stall * 1e3:.0f} ms, {failed} of {operations} failed\n")
    recorder.add("rail cut, longest stall", "ms", stalls)
    recorder.add("rail cut, failed operations", "1", failures)
    recorder.add("rail plugged in again, until healthy", "s", returns)
    verdict(recorder, "rail cut, longest stall of all, ms", STALL_S_MAX * 1e3, max(stalls))
    verdict(recorder, "rail cut, failed operations", 0.0, sum(failures))
    for rail in pair.engine.statistics().rails:
        sys.stderr.write(f"{rail}\n")


def verdict(recorder: Recorder, bar: str, at_most: float, value: float) -> None:
    """Name a bar with its value."""
    word = "met" if value <= at_most else "MISSED"
    recorder.lines.append({"figure": "bar", "bar": f"{bar} <= {at_most:g}",
                           "value": round(value, 4), "verdict": word})  # fmt: skip
    sys.stderr.write(f"{bar} <= {at_most:g}: {value:.3f}, {word}\n")


def measure(namespace: str, options: argparse.Namespace) -> None:
    """The part that runs in the initiator's namespace."""
    recorder = Recorder("transfer_rails")
    with pair(namespace) as ends:
        if options.only in (None, "activations"):
            measure_activations(ends, recorder, options.rounds, options.seconds)
        if options.only in (None, "cut"):
            measure_cuts(ends, recorder, options.rounds, options.seconds)
    if not options.no_record:
        recorder.write()


def main() -> None:
    """Make the namespaces and measure in them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="Of one measurement.")
    parser.add_argument("--only", choices=["activations", "cut"])
    parser.add_argument("--rate-mbit", type=int, help="Limit each rail; by default it is not.")
    parser.add_argument("--no-record", action="store_true", help="Leave the results file alone.")
    options = parser.parse_args()
    inside = os.environ.get(INSIDE_VARIABLE)
    if inside is not None:
        measure(inside, options)
        return
    if os.geteuid() != 0:
        parser.exit(0, "left out: network namespaces need root\n")
    with two_namespaces(options.rate_mbit) as (ours, theirs):
        module = [sys.executable, "-m", "benchmarks.bench_transfer_rails", *sys.argv[1:]]
        done = subprocess.run(
            ["ip", "netns", "exec", ours, *module],
            env=os.environ | {INSIDE_VARIABLE: theirs},
            check=False,
        )
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
