"""What posting RDMA writes from Python costs, in three ways of making the work requests.

    tools/rdma-vm --nics 4 --rw benchmarks/results -- .venv/bin/python -m benchmarks.bench_verbs

A chain of writes of 64 scattered bytes each is posted in one call, then awaited:

    objects     a new SendWR and SGE of pyverbs for each piece
    templates   SendWR and SGE objects that are kept, patched for each piece
    arrays      what the engine does: arrays with the layout of the C structures

Measured is the time to build a chain, and to post it, which is the same work for all and there
mostly Soft-RoCE's sending. In the virtual machine every instruction is emulated, so only ratios
mean something there. With `--build-only` nothing is posted: that needs pyverbs but no device, so
it can be measured on the host itself. Without pyverbs it says so and ends.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import torch

from benchmarks.harness import Recorder
from transfer.backends import verbs
from transfer.memory.region import Access, Region, make_offer

PIECE_BYTES: Final = 64
STRIDE: Final = 4096


class Unwatched:
    """An event loop for what is polled by hand."""

    def watch(self, *_: Any) -> None:
        """Nothing to do."""

    def unwatch(self, *_: Any) -> None:
        """Nothing to do."""


class Nowhere:
    """Addresses and keys of nothing: to build chains with."""

    def __init__(self) -> None:
        from transfer.backends.verbs.chain import Chain

        self.chain = Chain(1)
        self.local, self.remote = 1 << 32, 1 << 33
        self.local_key, self.remote_key = 1, 2


class Path(Nowhere):
    """A connected pair of queue pairs, and memory at both ends."""

    def __init__(self, num_pieces: int) -> None:
        super().__init__()
        from transfer.backends.verbs.completion import CompletionQueue
        from transfer.backends.verbs.device import open_devices
        from transfer.backends.verbs.domain import PeerDomain
        from transfer.backends.verbs.messages import LANES
        from transfer.backends.verbs.queue_pair import QueuePair, make_end
        from transfer.backends.verbs.responder import Inbox, ServedRail

        near, far = open_devices(("rxe0", "rxe2"), lambda _: "")[0]
        domain, far_domain = PeerDomain(near), PeerDomain(far)
        self.completions = CompletionQueue(near, 4096)
        inbox = Inbox(far_domain, Unwatched(), lambda _: None)  # type: ignore[arg-type]
        served = ServedRail(1, inbox)
        pairs = [
            QueuePair(near, domain.domain, self.completions, send_requests=1024, pieces=1)
            for _ in range(LANES)
        ]
        end = served.open(make_end(near, pairs))
        for i, pair in enumerate(pairs):
            pair.connect(end, i)
        self.pair = pairs[0]
        size = num_pieces * STRIDE
        self.source, self.target = (Region(torch.zeros(size, dtype=torch.uint8)) for _ in "ab")
        offer = make_offer(self.target, to="a", access=Access.WRITE, offset=0, nbytes=None)
        self.local_key, self.local = domain.local(self.source)
        self.remote_key, self.remote = far_domain.remote(b"t" * 16, offer)
        # In the order in which they can be destroyed.
        self.parts = [*pairs, served, inbox, domain, far_domain, self.completions, near, far]

    def post(self, chain: Any) -> float:
        """Post a chain and wait for its one completion; return the seconds of the post alone."""
        started = time.perf_counter()
        self.pair.post(chain[0])
        elapsed_s = time.perf_counter() - started
        while not (found := self.completions.poll()):
            time.sleep(0.0005)
        if found[0].status:
            raise RuntimeError(f"a write failed with status {found[0].status}")
        return elapsed_s

    def close(self) -> None:
        """Destroy everything."""
        for part in self.parts:
            part.close()


def by_objects(path: Nowhere, sources: Any, targets: Any) -> Any:
    """New objects for each piece; return the chain, and what keeps it alive."""
    from pyverbs.wr import SGE, SendWR

    from transfer.backends.verbs.chain import SIGNALLED, WRITE

    following = None
    keep = []
    for source, target in zip(sources[::-1].tolist(), targets[::-1].tolist(), strict=True):
        element = SGE(path.local + source, PIECE_BYTES, path.local_key)
        flags = SIGNALLED if following is None else 0
        request = SendWR(opcode=WRITE, num_sge=1, sg=[element], send_flags=flags)
        request.set_wr_rdma(path.remote_key, path.remote + target)
        if following is not None:
            request.next_wr = following
        keep.append(request)
        following = request
    return following, keep


def by_templates(path: Nowhere, num_pieces: int) -> Callable[[Nowhere, Any, Any], Any]:
    """Make objects once; what is returned patches them."""
    from pyverbs.wr import SGE, SendWR

    from transfer.backends.verbs.chain import SIGNALLED, WRITE

    elements = [SGE(0, PIECE_BYTES, path.local_key) for _ in range(num_pieces)]
    requests = [SendWR(opcode=WRITE, num_sge=1, sg=[element], send_flags=0) for element in elements]
    requests[-1].send_flags = SIGNALLED
    for i, request in enumerate(requests):
        request.sg_list = elements[i]
        if i + 1 < num_pieces:
            request.next_wr = requests[i + 1]

    def patch(path: Nowhere, sources: Any, targets: Any) -> Any:
        for element, request, source, target in zip(
            elements, requests, sources.tolist(), targets.tolist(), strict=True
        ):
            element.addr = path.local + source
            request.set_wr_rdma(path.remote_key, path.remote + target)
        return requests[0], requests

    return patch


def by_arrays(path: Nowhere, sources: Any, targets: Any) -> Any:
    """As the engine does."""
    from transfer.backends.verbs.chain import WRITE
    from transfer.backends.verbs.plan import plan

    lengths = np.full(len(sources), PIECE_BYTES)
    requests = plan(sources + path.local, targets + path.remote, lengths, 1)
    head = path.chain.fill(
        requests, 0, len(requests), wr_id=0, opcode=WRITE, remote_key=path.remote_key,
        local_key=path.local_key, last_opcode=WRITE, immediate=0,
    )  # fmt: skip
    return head, requests


def measure(
    path: Nowhere, num_pieces: int, rounds: int
) -> Iterator[tuple[str, list[float], list[float]]]:
    """Build and post in each way, in turns; give microseconds for each piece."""
    ways = {
        "objects": by_objects,
        "templates": by_templates(path, num_pieces),
        "arrays": by_arrays,
    }
    built: dict[str, list[float]] = {name: [] for name in ways}
    posted: dict[str, list[float]] = {name: [] for name in ways}
    rng = np.random.default_rng()
    for _ in range(rounds):
        sources, targets = (rng.permutation(num_pieces) * STRIDE for _ in "ab")
        for name, build in ways.items():
            started = time.perf_counter()
            chain = build(path, sources, targets)
            built[name].append((time.perf_counter() - started) * 1e6 / num_pieces)
            if isinstance(path, Path):
                posted[name].append(path.post(chain) * 1e6 / num_pieces)
    for name in ways:
        yield name, built[name], posted[name]


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--pieces", type=int, default=256)
    parser.add_argument("--build-only", action="store_true")
    options = parser.parse_args()
    reason = None if options.build_only else verbs.unavailable()
    if reason is not None:
        print(f"nothing measured: {reason}", file=sys.stderr)
        return
    path = Nowhere() if options.build_only else Path(options.pieces)
    recorder = Recorder("verbs_build" if options.build_only else "verbs")
    built: dict[str, list[float]] = {}
    for name, building, posting in measure(path, options.pieces, options.rounds):
        built[name] = building
        recorder.add("build", "us/write", building, way=name, chain=options.pieces)
        if posting:
            recorder.add("post", "us/write", posting, way=name, chain=options.pieces)
    for name in ("objects", "templates"):
        ratios = [a / b for a, b in zip(built[name], built["arrays"], strict=True)]
        recorder.add(f"build, {name} over arrays", "1", ratios, chain=options.pieces)
    recorder.write()
    if isinstance(path, Path):
        path.close()


if __name__ == "__main__":
    main()
