"""Dispatch and combine between processes, and what both cost one processor.

    python -m benchmarks.bench_dispatch                    # under 6 minutes
    python -m benchmarks.bench_dispatch --ranks 2 --tokens 128 --rounds 5

2 and 4 processes; 1 to 1024 tokens a rank, hidden 2048, top-8 of 64 experts, bf16; experts return
what they get. The time of an exchange is that of the slowest rank, its processor time that of all
ranks and all their threads. Contestants take turns, round by round, with fresh tokens in each; a
ratio is taken within a round, its median counts.

    shared_memory, tcp   the transfer dispatcher
    gloo                 the same messages by `CollectiveDispatcher` on gloo's all_to_all_single
    gloo bytes           two all_to_all_single of the same rows; nothing is routed, packed or summed
    deepspeed            DeepSpeed's MoE layer, no token dropped; what its gate does is done before

The second part is one process: route, pack, unpack and combine of rank 0 of two, against memcpy of
the bytes that they have to move.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.dispatch_ranks import RankGroup, RankGroupFailed
from benchmarks.harness import Recorder
from benchmarks.peer_environment import InstallFailed, deepspeed_environment, default_folder
from configs.schema import MissingExperts
from dispatch import DispatchLayout, ExpertMap
from dispatch.exchange import Exchange
from dispatch.message import Stamp
from dispatch.statistics import Counters
from dispatch.weighted_sum import WeightedSum
from transfer import allocate

HIDDEN, TOPK, EXPERTS = 2048, 8, 64
CONTESTANTS = {
    "shared_memory": "ours",
    "tcp": "ours",
    "gloo": "ours",
    "gloo bytes": "ours",
    "deepspeed": "deepspeed",
}
SAMPLE_S = 0.25
ITERATIONS_MAX = 200
MEMCPY_TOKENS = 1024


@contextlib.contextmanager
def groups_of(num_ranks: int, deepspeed: Path | None) -> Iterator[dict[str, RankGroup]]:
    """Start both kinds of processes; those of DeepSpeed only where it is."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pythons = {"ours": Path(sys.executable), "deepspeed": deepspeed}
        groups = {
            kind: stack.enter_context(RankGroup(kind, python, num_ranks, folder))
            for kind, python in pythons.items()
            if python is not None
        }
        for kind, group in list(groups.items()):
            try:
                group.wait_ready()
            except RankGroupFailed as failure:
                sys.stderr.write(f"{kind}: {failure}\n")
                del groups[kind]
        yield groups


def iterations_of(group: RankGroup, request: dict[str, object]) -> int:
    """As many as fill a sample, guessed from two."""
    group.ask(request)
    seconds = max(found["seconds"] for found in group.ask({**request, "iterations": 2}))
    return int(min(ITERATIONS_MAX, max(2, SAMPLE_S / seconds)))


def measure_case(
    recorder: Recorder, groups: dict[str, RankGroup], num_ranks: int, num_tokens: int, rounds: int
) -> None:
    """All contestants in turns on one number of tokens."""
    times: dict[str, list[float]] = {}
    used: dict[str, list[float]] = {}
    bytes_of: dict[str, list[int]] = {}
    request: dict[str, object] = {"tokens": num_tokens, "seed": 1}
    running = {}
    for name, kind in CONTESTANTS.items():
        if kind in groups:
            with reported(name):
                running[name] = iterations_of(groups[kind], {**request, "contestant": name})
    for number in range(rounds):
        order = list(running) if number % 2 else list(reversed(running))
        for name in order:
            asked = {"tokens": num_tokens, "seed": 100 * number, "contestant": name}
            with reported(name):
                found = groups[CONTESTANTS[name]].ask({**asked, "iterations": running[name]})
                times.setdefault(name, []).append(max(f["seconds"] for f in found) * 1e6)
                used.setdefault(name, []).append(sum(f["cpu_seconds"] for f in found) * 1e6)
                bytes_of.setdefault(name, []).append(sum(int(f["sent_bytes"]) for f in found))
    case = {"ranks": num_ranks, "tokens": num_tokens}
    for name, samples in times.items():
        sent = statistics.median(bytes_of[name])
        recorder.add("dispatch + combine", "us", samples, contestant=name, **case, sent_bytes=sent)
        recorder.add("processor time, all ranks", "us", used[name], contestant=name, **case)
    for name in ("shared_memory", "tcp"):
        for other in ("gloo", "gloo bytes", "deepspeed"):
            pairs = list(zip(times.get(name, []), times.get(other, []), strict=False))
            if pairs:
                label = f"{name} over {other}"
                recorder.add("ratio of times", "1", [a / b for a, b in pairs], pair=label, **case)


@contextlib.contextmanager
def reported(name: str) -> Iterator[None]:
    """Say that a contestant failed, and go on."""
    try:
        yield
    except RankGroupFailed as failure:
        sys.stderr.write(f"{name}: {failure}\n")


class Pair:
    """Rank 0 of two in one process; the other one's messages are made once."""

    def __init__(self, num_tokens: int) -> None:
        self.layout = DispatchLayout(
            hidden=HIDDEN,
            topk=TOPK,
            num_logical=EXPERTS,
            num_layers=1,
            dtype=torch.bfloat16,
            max_tokens=num_tokens,
            combine_dtype=torch.bfloat16,
        )
        spread = ExpertMap.even(num_layers=1, num_logical=EXPERTS, ranks=[0, 1])
        self.mine, self.other = (
            Exchange(
                self.layout,
                spread,
                (0, 1),
                rank,
                missing_experts=MissingExperts.WAIT,
                counters=Counters(self.layout),
                weighted_sum=WeightedSum(self.layout),
            )
            for rank in (0, 1)
        )
        self.there, self.back = Stamp(1, 0, 0, 0), Stamp(1, 0, 0, 1)
        # The kind of memory that windows are made of.
        self._memories = [
            allocate(size)
            for size in (
                self.layout.dispatch_window_bytes(EXPERTS // 2),
                self.layout.combine_window_bytes(),
            )
            for _ in range(2)
        ]
        self.windows = [memory.tensor.numpy() for memory in self._memories]
        self.tokens = [self._tokens(num_tokens) for _ in range(2)]
        theirs = self.other.send(*self.tokens[1], self.there)
        self.other.write_dispatch(theirs, 0, self.windows[0])
        ours = self.mine.send(*self.tokens[0], self.there)
        self.mine.write_dispatch(ours, 1, self.windows[1])
        rows, handle = self.other.receive(theirs, {0: self.windows[1]})
        returning = self.other.returning(rows.rows, handle, self.back)
        self.other.write_combine(returning, 0, self.windows[2])
        self.moved_bytes = self._moved()

    @staticmethod
    def _tokens(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weights, ids = torch.rand(num_tokens, EXPERTS).topk(TOPK, 1)
        return torch.randn(num_tokens, HIDDEN).bfloat16(), ids.contiguous(), weights.contiguous()

    def exchange(self) -> torch.Tensor:
        """Everything that rank 0 computes for one exchange."""
        mine = self.mine
        outgoing = mine.send(*self.tokens[0], self.there)
        mine.write_dispatch(outgoing, 1, self.windows[1])
        rows, handle = mine.receive(outgoing, {1: self.windows[0]})
        returning = mine.returning(rows.rows, handle, self.back)
        mine.write_combine(returning, 1, self.windows[3])
        return mine.finish(returning, {1: self.windows[2]})

    def _moved(self) -> int:
        """Bytes written: rows to the other, rows of own experts, results, and the sums.

        The sums read a row for each choice and write one for each token; a memcpy reads and writes
        as much, so they count half of both together.
        """
        (_, ids, _), (_, theirs, _) = self.tokens
        away, here = ids >= EXPERTS // 2, theirs < EXPERTS // 2
        packed = int(away.any(1).sum())
        unpacked = int((~away).sum()) + int(here.sum())
        returned = int(here.sum())
        summed = (ids.numel() + len(ids)) / 2
        return int((packed + unpacked + returned + summed) * self.layout.row_bytes)


def timed(call: Callable[[], object], seconds: float) -> float:
    """Mean processor time of a call in microseconds, over about so many seconds."""
    count, start = 0, time.thread_time()
    while (used := time.thread_time() - start) < seconds:
        call()
        count += 1
    return used / count * 1e6


def measure_processor(recorder: Recorder, rounds: int) -> None:
    """Route, pack, unpack and combine against memcpy, in turns."""
    torch.set_num_threads(1)
    pair = Pair(MEMCPY_TOKENS)
    # In pieces of the size of a message, as the exchange has them: what is in the cache counts.
    source, target = (np.zeros(pair.moved_bytes // 4, np.uint8) for _ in range(2))

    def memcpy() -> None:
        for _ in range(4):
            np.copyto(target, source)

    for call in (pair.exchange, memcpy):
        timed(call, 0.1)
    both = [(timed(pair.exchange, 0.2), timed(memcpy, 0.2)) for _ in range(rounds)]
    label = {"tokens": MEMCPY_TOKENS, "moved_bytes": pair.moved_bytes}
    recorder.add("route, pack, unpack, combine", "us", [ours for ours, _ in both], **label)
    recorder.add("memcpy of the same bytes", "us", [copy for _, copy in both], **label)
    recorder.add("ratio to memcpy", "1", [ours / copy for ours, copy in both], **label)


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 128, 1024])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-deepspeed", action="store_true", help="Leave DeepSpeed out.")
    parser.add_argument("--peers", type=Path, default=default_folder().with_name("deepspeed"))
    options = parser.parse_args()
    recorder = Recorder("dispatch")
    measure_processor(recorder, options.rounds)
    deepspeed = None
    if not options.no_deepspeed:
        try:
            deepspeed = deepspeed_environment(options.peers)
        except InstallFailed as failure:
            sys.stderr.write(f"deepspeed: {failure}\n")
    for num_ranks in options.ranks:
        with groups_of(num_ranks, deepspeed) as groups:
            for num_tokens in options.tokens:
                measure_case(recorder, groups, num_ranks, num_tokens, options.rounds)
    recorder.write()


if __name__ == "__main__":
    main()
