"""One rank of `bench_dispatch`: ours, gloo and DeepSpeed behind the same questions.

    python dispatch_rank.py ours|deepspeed <rank> <ranks> <folder>

    <- {"ready": true}
    -> {"tokens": 128, "contestant": "tcp", "seed": 7, "iterations": 50}
    <- {"seconds": 0.0012, "cpu_seconds": 0.0009, "sent_bytes": 345678}     or {"error": "..."}

Every rank gets every line. A line without "iterations" prepares a case and answers {}. Experts
return what they get: what is timed is the way there and back.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

HIDDEN, TOPK, EXPERTS = 2048, 8, 64
WAIT_S = 60.0
WARM_ITERATIONS = 3

# Whatever libraries write to standard output would be taken for an answer.
_answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Exchange = Callable[[], torch.Tensor]


class Side(Protocol):
    """What this process can measure."""

    def exchange(self, contestant: str, tokens: Tokens) -> Exchange:
        """Return what is timed: there and back, the sums at the end."""
        ...

    def sent_bytes(self) -> int:
        """Bytes that this rank sent in the last exchange; 0 if nobody counts."""
        ...


def tokens_of(num_tokens: int, seed: int) -> Tokens:
    """Rows, distinct experts, weights that add up to 1."""
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    x = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
    scores = torch.rand(num_tokens, EXPERTS, generator=generator)
    weights, ids = scores.topk(TOPK, 1)
    return x, ids.contiguous(), (weights / weights.sum(1, keepdim=True)).contiguous()


class Ours:
    """The dispatcher over shared memory, tcp and gloo; and the same bytes through gloo alone."""

    def __init__(self) -> None:
        from configs.schema import DispatchConfig, TransferBackend, TransferConfig
        from dispatch.deepep.carriers import ByCollective, ByTransfer, Carrier, swap_by_group
        from transfer import TransferEngine

        rank, size = dist.get_rank(), dist.get_world_size()
        self._carriers: dict[str, Carrier] = {"gloo": ByCollective()}
        self._engines = []
        for backend in (TransferBackend.SHARED_MEMORY, TransferBackend.TCP):
            names = {r: f"{backend.value}-{r}" for r in range(size)}
            engine = TransferEngine(
                TransferConfig(backend=backend), name=names[rank], secret=b"of this benchmark"
            )
            engine.open()
            addresses = [""] * size
            dist.all_gather_object(addresses, engine.address)
            for address in addresses[:rank]:
                engine.connect(address, timeout_s=WAIT_S)
            dist.barrier()
            self._engines.append(engine)
            self._carriers[backend.value] = ByTransfer(
                engine,
                DispatchConfig(pass_timeout_s=WAIT_S),
                rank=rank,
                members=names,
                swap=swap_by_group(),
            )
        self._dispatchers: dict[tuple[str, int], Any] = {}
        self._last: Any = None

    def _dispatcher(self, contestant: str, num_tokens: int) -> Any:
        from dispatch import DispatchLayout

        key = contestant, num_tokens
        if key not in self._dispatchers:
            layout = DispatchLayout(
                hidden=HIDDEN,
                topk=TOPK,
                num_logical=EXPERTS,
                num_layers=1,
                dtype=torch.bfloat16,
                max_tokens=num_tokens,
                combine_dtype=torch.bfloat16,
            )
            self._dispatchers[key] = self._carriers[contestant].dispatcher(layout)
            self._dispatchers[key].begin_pass()
        return self._dispatchers[key]

    def exchange(self, contestant: str, tokens: Tokens) -> Exchange:
        if contestant not in (*self._carriers, "gloo bytes"):
            raise LookupError(f"no such contestant: {contestant}")
        if contestant == "gloo bytes":
            return self._bytes_alone(tokens)
        dispatcher = self._dispatcher(contestant, len(tokens[0]))
        self._last = dispatcher

        def run() -> torch.Tensor:
            arrived, handle = dispatcher.dispatch(*tokens, layer=0)
            return dispatcher.combine(arrived.rows, handle)  # type: ignore[no-any-return]

        return run

    def _bytes_alone(self, tokens: Tokens) -> Exchange:
        """Two calls of all_to_all_single with as many rows; nothing is routed or packed."""
        x, ids, _ = tokens
        size, row_bytes = dist.get_world_size(), 2 * HIDDEN
        owner = ids // (EXPERTS // size)
        there = [int((owner == rank).any(1).sum()) * row_bytes for rank in range(size)]
        back = [int((owner == rank).sum()) * row_bytes for rank in range(size)]
        mine = dist.get_rank()
        there[mine] = back[mine] = 0  # own rows never become a message
        theirs = torch.empty(2, size, dtype=torch.int64)
        dist.all_to_all_single(theirs[0], torch.tensor(there))
        dist.all_to_all_single(theirs[1], torch.tensor(back))
        come, sent = theirs[0].tolist(), theirs[1].tolist()
        source, target = (torch.zeros(n, dtype=torch.uint8) for n in (sum(there), sum(come)))
        results, returned = (torch.zeros(n, dtype=torch.uint8) for n in (sum(sent), sum(back)))
        self._last = None

        def run() -> torch.Tensor:
            dist.all_to_all_single(target, source, come, there)
            dist.all_to_all_single(returned, results, back, sent)
            return x

        return run

    def sent_bytes(self) -> int:
        return 0 if self._last is None else int(self._last.statistics().sent_bytes)


class DeepSpeed:
    """DeepSpeed's MoE layer with the gate's work done before, and experts that do nothing."""

    def __init__(self) -> None:
        import deepspeed

        # Its own all-reduce over shared memory is compiled at the first use, for a minute, and
        # takes no part in what is timed. (The attribute of this name is another module.)
        backend: Any = sys.modules["deepspeed.comm.torch"]
        backend.build_shm_op = lambda: None
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)

    def exchange(self, contestant: str, tokens: Tokens) -> Exchange:
        from deepspeed.moe.sharded_moe import MOELayer

        x, ids, weights = tokens
        counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
        capacity = counts.max()
        dist.all_reduce(capacity, op=dist.ReduceOp.MAX)
        mask = torch.zeros(len(x), EXPERTS, dtype=torch.int64).scatter_(1, ids, 1)
        places = (mask.cumsum(0) - 1).gather(1, ids)
        routes = (
            ids.t().contiguous().int(),
            places.t().contiguous().int(),
            weights.t().contiguous(),
        )

        class Gate(torch.nn.Module):
            def _set_ep_group(self, group: Any) -> None:
                del group

            def forward(self, *_: Any) -> Any:
                return (torch.zeros(()), capacity, EXPERTS, *routes, counts)

        size = dist.get_world_size()
        layer = MOELayer(Gate(), torch.nn.Identity(), "ranks", size, EXPERTS // size)
        layer._set_ep_group(dist.group.WORLD)

        def run() -> torch.Tensor:
            with torch.no_grad():
                return layer(x, None)  # type: ignore[no-any-return]

        return run

    def sent_bytes(self) -> int:
        return 0


def answer(side: Side, request: dict[str, Any]) -> dict[str, Any]:
    """Prepare and check a case, or time it."""
    tokens = tokens_of(request["tokens"], request["seed"])
    run = side.exchange(request["contestant"], tokens)
    out = run()
    x = tokens[0].float()
    if (out.float() - x).abs().max() > 0.05 * x.abs().max():
        raise RuntimeError(f"{request['contestant']}: the sums are wrong")
    if "iterations" not in request:
        return {}
    for _ in range(WARM_ITERATIONS):
        run()
    before = side.sent_bytes()
    dist.barrier()
    used, start = time.process_time(), time.perf_counter()
    for _ in range(request["iterations"]):
        run()
    seconds, used = time.perf_counter() - start, time.process_time() - used
    return {
        "seconds": seconds / request["iterations"],
        "cpu_seconds": used / request["iterations"],
        "sent_bytes": (side.sent_bytes() - before) // request["iterations"],
    }


def main() -> None:
    """Answer until standard input ends."""
    kind, rank, size, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/{kind}-{size}", size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=WAIT_S),
    )
    say({"ready": True})
    side: Side = {"ours": Ours, "deepspeed": DeepSpeed}[kind]()
    for line in sys.stdin:
        try:
            say(answer(side, json.loads(line)))
        except Exception as error:  # noqa: BLE001 - any failure of a contestant is a result
            say({"error": f"{type(error).__name__}: {error}"[:300]})
    os._exit(0)  # whatever threads the libraries have left


def say(fields: dict[str, Any]) -> None:
    """Write one JSON line for whoever drives this process."""
    _answers.write(json.dumps(fields) + "\n")
    _answers.flush()


if __name__ == "__main__":
    main()
