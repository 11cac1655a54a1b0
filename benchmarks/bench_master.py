"""Key operations per second and memory per key of one store master on one core.

    python -m benchmarks.bench_master [--quick]

Every request and reply passes through its MessagePack form, as on the control channel; the channel
itself is not measured. Requests name `BATCH` keys; nodes' segments are books only, no memory.

    put       Allocate and Finish of new keys, into free space or with an eviction for each;
              of chains, each looked for before, so that the master knows parents
    thousand  put and lookup in batches of 1000 keys, as of a long prompt, in one segment
    lookup    Lookup with a lease, and its Release, of chains that are there
    mix       of 10 batches: 6 lookups of chains (one in four misses its second half, which is then
              put), 3 puts of new keys, 1 Exists
    rebuild   Register and Hold of a segment's blocks in pieces, as a new master is told

Memory is the growth of the resident size of a process of its own (or with `traced`, of Python's
allocations) from the empty master to the last of a million keys, divided by the keys.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import secrets
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator

from benchmarks.harness import Recorder
from configs.schema import Eviction
from kvstore.events.event_log import EventLog
from kvstore.master.store_master import MasterTiming, StoreMaster
from kvstore.wire import messages as m

BATCH = 64
BLOCK_BYTES = 64 << 10
NODES = 4
PIECE = 16384
ROUNDS, WARMUP = 12, 2
LONG = 1000  # keys of a long batch
KEYS_IN_MEMORY = 1_000_000
KEYS_TO_REBUILD = 100_000


class Asker:
    """A master, and requests to it by way of their bytes."""

    def __init__(
        self,
        *,
        blocks: int,
        eviction: Eviction = Eviction.LRU,
        events: bool = False,
        nodes: int = NODES,
    ) -> None:
        log = EventLog(first_sequence=1) if events else None
        self.master = StoreMaster(MasterTiming(), eviction=eviction, events=log)
        self.now = 0.0
        self.batch = 0
        capacity = -(-blocks // nodes) * BLOCK_BYTES
        for i in range(nodes):
            self.ask(m.Register(f"node{i}", f"127.0.0.1:{i + 1}", capacity, True, m.HeldBlocks()))

    def ask(self, request: m.Request) -> m.Reply:
        """Do what client, channel and server do with a request, less the channel."""
        self.now += 1e-4
        reply = self.master.step(m.decode_request(m.encode(request)), self.now)
        self.master.take_events()
        decoded = m.decode_reply(m.encode(reply))
        assert not isinstance(decoded, m.Refused), decoded
        return decoded

    def put(self, keys: list[bytes], *, expected: bool = False) -> None:
        """Store new blocks; `expected`: of a chain that somebody has looked for in vain."""
        if expected:
            self.read([bytes(bytearray(key)) for key in keys])  # keys of their own, as on the wire
        self.batch += 1
        count = len(keys)
        request = m.Allocate("w", self.batch, keys, [BLOCK_BYTES] * count, [1 << 60] * count)
        reply = self.ask(request)
        assert isinstance(reply, m.Allocated)
        granted = [i for i, node in enumerate(reply.node_idx) if node >= 0]
        finished = self.ask(m.Finish("w", self.batch, granted))
        assert isinstance(finished, m.Finished)
        assert all(finished.stored)

    def read(self, keys: list[bytes]) -> int:
        """Look a chain up and let it go; return how many of its keys are there."""
        found = self.ask(m.Lookup("r", keys))
        assert isinstance(found, m.Located)
        if found.lease_id:
            self.ask(m.Release("r", [found.lease_id]))
        return len(found.offsets)


def new_chains() -> Iterator[list[bytes]]:
    """Yield batches of keys that nobody has seen."""
    for number in itertools.count():
        yield [(number * BATCH + i).to_bytes(16, "big") for i in range(BATCH)]


def rate(operations: int, started: float) -> float:
    """Return key operations per second of processor time."""
    return operations / (time.process_time() - started)


def measure_puts(
    recorder: Recorder, blocks: int, *, events: bool, eviction: Eviction, chains_known: bool = False
) -> None:
    labels = {"events": events, "eviction": eviction, "keys": blocks, "parents": chains_known}
    asker, chains = Asker(blocks=blocks, eviction=eviction, events=events), new_chains()
    per_round = blocks // BATCH // ROUNDS
    for what in ("put into free space", "put with evictions"):
        samples = []
        for _ in range(ROUNDS):
            batches = list(itertools.islice(chains, per_round))
            started = time.process_time()
            for keys in batches:
                asker.put(keys, expected=chains_known)
            samples.append(rate(per_round * BATCH, started))
        recorder.add(what, "keys/s", samples[WARMUP:], **labels)
        asker.master.check_invariants()


def measure_reads(recorder: Recorder, blocks: int, *, events: bool, eviction: Eviction) -> None:
    labels = {"events": events, "eviction": eviction, "keys": blocks}
    rng = random.Random(secrets.randbits(64))
    asker, source = Asker(blocks=blocks, eviction=eviction, events=events), new_chains()
    chains = list(itertools.islice(source, blocks // BATCH))
    for keys in chains:
        asker.put(keys)
    lookups, mixes = [], []
    for _ in range(ROUNDS):
        chosen = rng.choices(chains, k=1000)
        started = time.process_time()
        for keys in chosen:
            assert asker.read(keys) == BATCH
        lookups.append(rate(BATCH * len(chosen), started))
    recorder.add("lookup with lease and release", "keys/s", lookups[WARMUP:], **labels)
    for _ in range(ROUNDS):
        kinds = rng.choices(("hit", "half", "put", "exists"), (9, 3, 6, 2), k=1000)
        fresh = [next(source) for _ in kinds]
        started = time.process_time()
        for kind, keys in zip(kinds, fresh, strict=True):
            if kind == "put":
                asker.put(keys)
                chains[rng.randrange(len(chains))] = keys
            elif kind == "exists":
                asker.ask(m.Exists(rng.choice(chains)))
            elif kind == "hit":
                asker.read(rng.choice(chains))
            else:
                half = rng.choice(chains)[: BATCH // 2] + keys[BATCH // 2 :]
                found = asker.read(half)
                asker.put(half[found:])
        mixes.append(rate(BATCH * len(kinds), started))
    recorder.add("mix of lookups, puts and exists", "keys/s", mixes[WARMUP:], **labels)
    asker.master.check_invariants()


def measure_thousands(recorder: Recorder, blocks: int) -> None:
    """Batches of 1000 keys into a segment that is full: puts evict, and lookups lease all."""
    asker, puts, lookups = Asker(blocks=blocks, nodes=1), [], []
    source = itertools.chain.from_iterable(new_chains())
    batches = [list(itertools.islice(source, LONG)) for _ in range(2 * blocks // LONG)]
    for keys in batches[: blocks // LONG]:
        asker.put(keys)
    per_round = (len(batches) - blocks // LONG) // ROUNDS
    for number in range(ROUNDS):
        first = blocks // LONG + number * per_round
        chosen = batches[first : first + per_round]
        started = time.process_time()
        for keys in chosen:
            asker.put(keys)
        puts.append(rate(per_round * LONG, started))
        started = time.process_time()
        for keys in chosen:
            assert asker.read(keys) == LONG
        lookups.append(rate(per_round * LONG, started))
    labels = {"keys": blocks, "batch": LONG}
    recorder.add("put with evictions", "keys/s", puts[WARMUP:], **labels)
    recorder.add("lookup with lease and release", "keys/s", lookups[WARMUP:], **labels)
    asker.master.check_invariants()


def resident_bytes() -> int:
    """Return the resident size of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure_memory(
    recorder: Recorder, count: int, eviction: Eviction, *, chains_known: bool = False
) -> None:
    """Have it measured by a process of its own, whose memory was never used for anything else."""
    words = ["--memory", str(count), eviction.value, *(["parents"] if chains_known else [])]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_master", *words],
        stdout=subprocess.PIPE,
        timeout=600,
        check=True,
    )
    labels = {"keys": count, "eviction": eviction, "traced": False, "parents": chains_known}
    recorder.add("memory per key", "bytes", [json.loads(done.stdout)], **labels)


def bytes_per_key(
    count: int, eviction: Eviction, *, traced: bool = False, chains_known: bool = False
) -> float:
    """Fill a master; return what it has grown by."""
    asker, chains = Asker(blocks=count, eviction=eviction), new_chains()
    if traced:
        tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0] if traced else resident_bytes()
    for _ in range(count // BATCH):
        asker.put(next(chains), expected=chains_known)
    after = tracemalloc.get_traced_memory()[0] if traced else resident_bytes()
    tracemalloc.stop()
    return (after - before) / count


def measure_rebuild(recorder: Recorder, count: int) -> None:
    rng = random.Random(secrets.randbits(64))
    per_node = count // NODES
    samples = []
    for _ in range(ROUNDS):
        master = StoreMaster(MasterTiming())
        requests = []
        for i in range(NODES):
            order = rng.sample(range(per_node), per_node)
            pieces = [_held(i, order[at : at + PIECE]) for at in range(0, per_node, PIECE)]
            for at, held in enumerate(pieces):
                more = at + 1 < len(pieces)
                name, capacity = f"node{i}", per_node * BLOCK_BYTES
                requests.append(
                    m.Hold(name, 0, held, more)
                    if at
                    else m.Register(name, "127.0.0.1:1", capacity, False, held, more=more)
                )
        payloads = [m.encode(request) for request in requests]
        started = time.process_time()
        adopted = 0
        for payload in payloads:
            reply = master.step(m.decode_request(payload), 1.0)
            assert isinstance(reply, m.Registered)
            adopted += reply.adopted
        samples.append(time.process_time() - started)
        assert adopted == per_node * NODES
    recorder.add("rebuild", "s", samples[WARMUP:], keys=count, nodes=NODES)


def _held(node: int, places: list[int]) -> m.HeldBlocks:
    return m.HeldBlocks(
        keys=[((node << 40) + place).to_bytes(16, "big") for place in places],
        offsets=[place * BLOCK_BYTES for place in places],
        lengths=[BLOCK_BYTES] * len(places),
        checksums=[1 << 60] * len(places),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer keys, and nothing is written")
    parser.add_argument("--memory", nargs="+", help=argparse.SUPPRESS)  # see `measure_memory`
    options = parser.parse_args()
    if options.memory:
        count, eviction, *parents = options.memory
        found = bytes_per_key(int(count), Eviction(eviction), chains_known=bool(parents))
        sys.stdout.write(json.dumps(found))
        return
    recorder = Recorder("master")
    blocks = 20_000 if options.quick else 200_000
    for events, eviction in ((False, e) for e in Eviction) if not options.quick else ():
        measure_puts(recorder, blocks, events=events, eviction=eviction)
        measure_reads(recorder, blocks, events=events, eviction=eviction)
    measure_puts(recorder, blocks, events=True, eviction=Eviction.LRU)
    measure_reads(recorder, blocks, events=True, eviction=Eviction.LRU)
    measure_puts(recorder, blocks, events=False, eviction=Eviction.PREFIX_AWARE, chains_known=True)
    measure_thousands(recorder, blocks)
    measure_rebuild(recorder, KEYS_TO_REBUILD)
    count = 100_000 if options.quick else KEYS_IN_MEMORY
    for eviction in Eviction:
        measure_memory(recorder, count, eviction)
    measure_memory(recorder, count, Eviction.PREFIX_AWARE, chains_known=True)
    if not options.quick:
        recorder.write()


if __name__ == "__main__":
    main()
