"""What events say of chains: a router that knows vLLM's events alone builds its tree from them."""

from __future__ import annotations

import asyncio
import random
import secrets
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import zmq

from configs.kv_events import EventForm, KVEventsConfig
from kvstore import (
    AsyncStore,
    Chain,
    InvalidValue,
    PutOptions,
    PutOutcome,
    WriteThrough,
    prefix_keys,
)
from kvstore.events import chains
from kvstore.events.chains import Chains, Link, link_of, parents_first, runs_of
from kvstore.events.event_log import EventFold, EventLog, Medium, Stored, encode_changes
from kvstore.events.replay import ReplayBuffer
from kvstore.pages import PagedClient, PagedMemory, PageLayout, PageStrides
from kvstore.wire import messages as m
from tests.support.planned_pool import PlannedPool
from tests.support.store_pool import Pool
from transfer import allocate

SPACE = bytes(range(16))
TOKENS = 16
PUBLISHED = {
    "enabled": True,
    "endpoint": "tcp://127.0.0.1:*",
    "replay_endpoint": "tcp://127.0.0.1:*",
    "security": "plain",
}


# The shape of vLLM's own types (vllm/distributed/kv_events.py), written down anew.


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class BlockStored(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None


class BlockRemoved(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    block_hashes: list[bytes | int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    pass


class MapStored(msgspec.Struct, omit_defaults=True, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None


class MapBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[MapStored]
    data_parallel_rank: int | None = None


class Router:
    """Finds how many tokens of a prompt are there, by tokens alone: it cannot make our keys."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.parts: dict[Any, tuple[Any, tuple[int, ...]]] = {}  # hash -> (parent, tokens)
        self.media: dict[Any, set[str]] = {}
        self.orphans = 0

    def take(self, payload: bytes) -> None:
        batch = msgspec.msgpack.decode(payload, type=Batch)
        for event in batch.events:
            match event:
                case BlockStored():
                    self.store(event)
                case BlockRemoved():
                    for name in event.block_hashes:
                        self.media.get(name, set()).discard(event.medium)
                        if not self.media.get(name):
                            self.parts.pop(name, None)
                            self.media.pop(name, None)
                case AllBlocksCleared():
                    self.clear()

    def store(self, event: BlockStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        assert len(event.token_ids) in (0, size * len(event.block_hashes))
        self.orphans += parent is not None and parent not in self.parts
        for i, name in enumerate(event.block_hashes):
            self.media.setdefault(name, set()).add(event.medium)
            if event.token_ids:
                self.parts[name] = parent, tuple(event.token_ids[i * size : (i + 1) * size])
                parent = name

    def num_tokens(self, prompt: list[int], size: int = TOKENS) -> int:
        children = {part: name for name, part in self.parts.items()}
        at, name = 0, None
        while (found := children.get((name, tuple(prompt[at : at + size])))) is not None:
            at, name = at + size, found
        return at


def prompt_of(blocks: int) -> list[int]:
    return [random.randrange(1 << 32) for _ in range(TOKENS * blocks)]


def keys_of(prompt: list[int]) -> list[bytes]:
    return prefix_keys(prompt, block_tokens=TOKENS, namespace=SPACE)


def links_of(prompt: list[int]) -> dict[bytes, Link]:
    keys = keys_of(prompt)
    tokens = Chain(token_ids=prompt, block_tokens=TOKENS).tokens(len(keys))
    parents = [None, *keys[:-1]]
    return {k: Link(p, t) for k, p, t in zip(keys, parents, tokens, strict=True)}


@pytest.fixture
def pool(stack):
    return Pool(stack, events=KVEventsConfig(**PUBLISHED))


def replayed(pool, router, start=0):
    """Ask for everything from a number on; return the last number."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(pool.master.events.replay_endpoint)
        socket.send_multipart([b"", start.to_bytes(8, "big")])
        last = start
        while socket.poll(20_000):
            _, number, payload = socket.recv_multipart()
            if number == b"\xff" * 8:
                return last
            assert int.from_bytes(number, "big") >= last
            last = int.from_bytes(number, "big")
            router.take(payload)
    raise AssertionError("the replay has no end")


def test_a_router_builds_its_tree_from_puts(pool):
    shared = prompt_of(3)
    prompts = [shared + prompt_of(random.randint(1, 5)) for _ in range(4)]
    for prompt in prompts:
        keys = keys_of(prompt)
        options = PutOptions(chain=Chain(token_ids=prompt, block_tokens=TOKENS))
        outcomes = pool.store.put_batch(
            keys, [secrets.token_bytes(100)] * len(keys), options=options
        )
        assert PutOutcome.FAILED not in outcomes
    router = Router()
    replayed(pool, router)
    assert [router.num_tokens(prompt) for prompt in prompts] == [len(p) for p in prompts]
    assert router.num_tokens(shared + prompt_of(1)) == len(shared)
    assert router.num_tokens(prompt_of(2)) == 0
    assert router.orphans == 0
    pool.store.remove_batch(keys_of(prompts[0])[3:])
    replayed(pool, router)
    assert router.num_tokens(prompts[0]) == len(shared)


def test_a_chain_goes_on_from_its_parent_and_single_puts_tell_too(pool):
    prompt = prompt_of(4)
    keys = keys_of(prompt)
    for i, key in enumerate(keys):  # one at a time, the short way stands back
        chain = Chain(
            token_ids=prompt[i * TOKENS :],
            block_tokens=TOKENS,
            parent=keys[i - 1] if i else None,
        )
        assert pool.store.put(key, b"x" * 100, options=PutOptions(chain=chain)) is PutOutcome.STORED
        pool.store.put(secrets.token_bytes(16), b"y" * 100)
    router = Router()
    replayed(pool, router)
    assert router.num_tokens(prompt) == len(prompt)


async def put_asynchronously(store, keys, options):
    async with AsyncStore(store) as asynchronous:
        return await asynchronous.put_batch(keys, [b"z"] * len(keys), options=options)


def test_asynchronous_puts_tell_too(pool):
    prompt = prompt_of(3)
    options = PutOptions(chain=Chain(token_ids=prompt, block_tokens=TOKENS))
    asyncio.run(put_asynchronously(pool.connect(), keys_of(prompt), options))
    router = Router()
    replayed(pool, router)
    assert router.num_tokens(prompt) == len(prompt)


def test_what_is_written_through_is_told(pool, stack):
    """Chains of several requests, as a rank of the runtime submits them, in one put or several."""
    client = pool.store.client
    memory = allocate(64 * 100)
    stack.callback(memory.close)
    region = pool.store.register(memory)
    prompts = [prompt_of(4) for _ in range(6)]
    with WriteThrough(client, region, block_bytes=100, queue_blocks=64) as writer:
        for prompt in prompts:
            keys = keys_of(prompt)
            links = [
                link_of(prompt[i * TOKENS : (i + 1) * TOKENS], keys[i - 1] if i else None)
                for i in range(4)
            ]
            assert writer.submit(keys, [0, 100, 200, 300], links=links) == 4
        assert writer.submit([secrets.token_bytes(16)], [400]) == 1
        assert writer.flush(60)
        assert writer.statistics().stored == 25
    router = Router()
    replayed(pool, router)
    assert [router.num_tokens(prompt) for prompt in prompts] == [len(p) for p in prompts]


def test_pages_of_many_blocks_are_told_as_one_chain(pool, stack):
    """Each rank puts a part of every page, and gives the chain; the prompt is longer than that."""
    layout = PageLayout(
        model="m", dtype="float32", layers=1, block_tokens=TOKENS, kv_heads=4, key_size=2,
        value_size=2,
    )  # fmt: skip
    prompt, clients = prompt_of(20), []
    for rank in range(2):
        pages = allocate(5 * 2 * layout.block_bytes)
        stack.callback(pages.close)
        strides = PageStrides.packed("layer page part token head", layout, heads=2, pages=5)
        memory = PagedMemory(regions=(pool.store.register(pages),), strides=strides)
        clients.append(PagedClient(pool.store.client, layout, memory, rank=rank, size=2))
    keys = clients[0].keys(prompt)[:5]
    for start, stop in ((0, 3), (3, 5)):
        chain = Chain(
            token_ids=prompt[start * TOKENS :],
            block_tokens=TOKENS,
            parent=keys[start - 1] if start else None,
        )
        for client in clients:
            there = client.put(
                keys[start:stop], range(start, stop), options=PutOptions(chain=chain)
            )
            assert there == [True] * (stop - start)
    router = Router()
    replayed(pool, router)
    assert len(router.media) == 5 * layout.num_groups, "every block was told"
    assert router.parts.keys() == set(keys), "and what the pages are, not their other blocks"
    assert router.num_tokens(prompt) == 5 * TOKENS


def test_several_masters_each_tell_of_their_blocks(stack):
    pool = Pool(stack, masters=3, events=KVEventsConfig(**PUBLISHED))
    prompt = prompt_of(20)
    options = PutOptions(chain=Chain(token_ids=prompt, block_tokens=TOKENS))
    assert set(pool.store.put_batch(keys_of(prompt), [b"z"] * 20, options=options)) == {
        PutOutcome.STORED
    }
    whole = Router()
    for master in pool.masters:
        pool.master = master
        router = Router()
        replayed(pool, router)
        whole.parts |= router.parts
    assert whole.num_tokens(prompt) == len(prompt)


def test_without_events_nobody_is_told_twice(stack, monkeypatch):
    pool = Pool(stack)
    asked = []
    transitions = pool.master._master._transitions
    describe = transitions[m.Describe]
    monkeypatch.setitem(
        transitions, m.Describe, lambda request, now: asked.append(1) or describe(request, now)
    )
    for _ in range(5):
        prompt = prompt_of(2)
        options = PutOptions(chain=Chain(token_ids=prompt, block_tokens=TOKENS))
        assert set(pool.store.put_batch(keys_of(prompt), [b"z"] * 2, options=options)) == {
            PutOutcome.STORED
        }
    assert len(asked) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: Chain(token_ids=[1], block_tokens=0),
        lambda: Chain(token_ids=[1], block_tokens=1 << 20),
        lambda: Chain(token_ids=[1], block_tokens=1, parent=b"short"),
        lambda: Chain(token_ids=[1] * 5, block_tokens=3).tokens(2),
        lambda: Chain(token_ids=[-1], block_tokens=1).tokens(1),
        lambda: Chain(token_ids=[1 << 32], block_tokens=1).tokens(1),
        lambda: Chain(token_ids=[1 << 70], block_tokens=1).tokens(1),
        lambda: Chain(token_ids=["x"], block_tokens=1).tokens(1),
        lambda: Chain(token_ids=[[1]], block_tokens=1).tokens(1),
    ],
)
def test_nonsense_is_refused(make):
    with pytest.raises(InvalidValue):
        make()


def test_a_master_refuses_what_makes_no_sense():
    pool = PlannedPool()
    key = secrets.token_bytes(16)
    for columns in (([key], [], [b""]), ([key], [b"x"], [b""]), ([key], [b""], [b"xyz"])):
        reply = pool.step(m.Describe("c", *columns))
        assert isinstance(reply, m.Refused)
    assert pool.step(m.Describe("c", [key], [b""], [b"four"])) == m.Done(1)


# -- what the log and its replay keep ---------------------------------------------------------


def test_both_forms_hold_the_same():
    prompt = prompt_of(3)
    keys, links = keys_of(prompt), links_of(prompt)
    shuffled = random.sample(keys, 3)
    change = Stored(keys=(b"a" * 16, *shuffled), medium=Medium.SSD, links=links)
    array = msgspec.msgpack.decode(
        encode_changes([change], at_s=1.0, form=EventForm.ARRAY, block_tokens=7), type=Batch
    )
    named = msgspec.msgpack.decode(
        encode_changes([change], at_s=1.0, form=EventForm.MAP, block_tokens=7), type=MapBatch
    )
    alone, chain = array.events
    assert (alone.block_hashes, alone.token_ids, alone.block_size) == ([b"a" * 16], [], 7)
    assert (chain.block_hashes, chain.token_ids) == (keys, prompt)
    assert (chain.parent_block_hash, chain.block_size, chain.medium) == (None, TOKENS, "STORAGE")
    for one, other in zip(array.events, named.events, strict=True):
        for name in MapStored.__struct_fields__:
            assert getattr(one, name) == getattr(other, name)


def test_replay_tells_links_of_what_is_forgotten_and_of_what_moved():
    log, router = EventLog(first_sequence=1), Router()
    buffer = ReplayBuffer(
        batches_max=2,
        bytes_max=1 << 20,
        encode=lambda changes: encode_changes(
            changes, at_s=1.0, form=EventForm.ARRAY, block_tokens=TOKENS
        ),
    )

    def publish():
        for batch in log.take():
            buffer.append(batch, buffer._encode(batch.changes))

    prompts = [prompt_of(4) for _ in range(6)]
    for prompt in prompts:
        links = links_of(prompt)
        log.describe(list(links), links.values())
        log.stored(list(links))
        publish()
    first, second = keys_of(prompts[0]), keys_of(prompts[1])
    log.stored(first, Medium.SSD)
    log.removed(first)
    log.removed(second)
    publish()
    for number, payload in buffer.since(0):
        assert number > 0
        router.take(payload)
    assert [router.num_tokens(p) for p in prompts] == [len(prompts[0]), 0, *[64] * 4]
    assert router.media[first[0]] == {"STORAGE"}
    log.restate([(key, Medium.SSD) for key in first])
    publish()
    fresh = Router()
    list(map(fresh.take, (payload for _, payload in buffer.since(1 << 40))))
    (batch,) = [kept.batch for kept in list(buffer._kept)[-1:]]
    fresh.take(buffer._encode(batch.changes))
    assert fresh.num_tokens(prompts[0]) == len(prompts[0])


def test_links_are_forgotten_with_their_blocks_and_bounded_before(monkeypatch):
    monkeypatch.setattr(chains, "AWAITED_MAX", 50)
    known, fold = Chains(), EventFold()
    links = links_of(prompt_of(200))
    known.describe(list(links), links.values())
    assert len(known._awaited) == 50
    assert known._awaited_bytes == 50 * 4 * TOKENS
    found = known.stored(list(links))
    assert list(found) == list(links)[-50:]
    assert (len(known._awaited), known._awaited_bytes) == (0, 0)
    known.stored(list(found)[:10])  # in another medium
    known.removed(list(found))
    assert set(known._present) == set(list(found)[:10])
    known.removed(list(found))
    assert not known._present
    assert not known._media
    fold.apply([Stored(keys=tuple(found), medium=Medium.DRAM, links=found)])
    fold.apply(EventLog(first_sequence=1).take()[0].changes)
    assert not fold._links


def test_parents_come_first_whatever_was_told():
    links = {}
    keys = [secrets.token_bytes(16) for _ in range(200)]
    for key in keys[20:]:
        links[key] = Link(random.choice([None, secrets.token_bytes(16), *keys]), b"four")
    ordered = parents_first(random.sample(keys, len(keys)), links)
    assert sorted(ordered) == sorted(keys)
    place = {key: i for i, key in enumerate(ordered)}

    def is_rooted(key, seen=()):
        parent = links[key].parent if key in links else None
        if parent not in place:
            return True
        return parent not in seen and is_rooted(parent, (*seen, key))

    for key in keys:
        parent = links[key].parent if key in links else None
        if parent in place and is_rooted(key):
            assert place[parent] < place[key]
    runs = list(runs_of(keys, links))
    assert sorted(key for run in runs for key in run) == sorted(keys)
    for run in runs[1:]:
        for before, key in pairwise(run):
            assert links[key].parent == before
