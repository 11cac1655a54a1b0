"""The scheduler against a direct computation: any interleaving gives the same tokens."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

import pytest

from moe_runtime.pages import PagePool
from moe_runtime.request import PassPlan, Request
from moe_runtime.scheduler import Emit, FetchBlocks, Instruction, Scheduler, StoreBlock

PAGE_TOKENS = 4


@dataclass(frozen=True)
class Budget:
    """Stands for the sampling parameters: all that the scheduler asks of them."""

    max_tokens: int

    def finish_reason(self, token_id: int, *, num_output: int) -> str | None:
        return "length" if num_output >= self.max_tokens else None


def next_token(token_ids: list[int]) -> int:
    return zlib.crc32(repr(token_ids).encode()) % 50


def block_key(parent: bytes | None, token_ids: list[int]) -> bytes:
    return zlib.crc32((parent or b"") + repr(list(token_ids)).encode()).to_bytes(4, "big")


def scheduler(pool: PagePool, *, fetch: bool = False, budget: int = 16) -> Scheduler:
    return Scheduler(
        pool,
        page_tokens=PAGE_TOKENS,
        token_budget=budget,
        max_running=4,
        block_key=block_key,  # type: ignore[arg-type]
        fetch_from_pool=fetch,
    )


def request(name: str, prompt: list[int], max_tokens: int) -> Request:
    return Request(
        request_id=name,
        token_ids=list(prompt),
        num_prompt=len(prompt),
        sampling=Budget(max_tokens),  # type: ignore[arg-type]
    )


class Rank:
    """Performs the instructions of a scheduler the way a rank loop would, at random moments."""

    def __init__(self, machine: Scheduler, pool: PagePool, rng: random.Random) -> None:
        self.machine, self.pool, self.rng = machine, pool, rng
        self.fetches: list[FetchBlocks] = []
        self.stores: list[StoreBlock] = []
        self.emitted: dict[str, list[int]] = {}
        self.finished: set[str] = set()

    def perform(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case FetchBlocks():
                    self.fetches.append(instruction)
                case StoreBlock():
                    named = self.machine._block_key(instruction.parent, list(instruction.tokens))
                    assert instruction.key == named, "what subscribers are told of it"
                    self.stores.append(instruction)
                case Emit():
                    tokens = self.emitted.setdefault(instruction.request_id, [])
                    assert instruction.index == len(tokens)
                    tokens.append(instruction.token_id)
                    if instruction.finish_reason:
                        self.finished.add(instruction.request_id)

    def run_pass(self, *, abort: bool) -> PassPlan:
        plan, instructions = self.machine.plan()
        self.perform(instructions)
        for chunk in plan.chunks:
            assert chunk.start == chunk.request.num_computed
            assert len(chunk.request.pages) * PAGE_TOKENS >= chunk.start + chunk.count
        if not abort:
            sampled = [next_token(c.request.token_ids) for c in plan.chunks if c.samples]
            self.perform(self.machine.complete(plan, sampled))
        return plan

    def settle(self) -> None:
        if self.fetches and self.rng.random() < 0.5:
            fetch = self.fetches.pop(self.rng.randrange(len(self.fetches)))
            self.machine.fetched(fetch.request_id, self.rng.randint(0, len(fetch.pages)))
        if self.stores and self.rng.random() < 0.5:
            store = self.stores.pop(self.rng.randrange(len(self.stores)))
            self.pool.release([store.page])


@pytest.mark.parametrize("fetch", [False, True])
@pytest.mark.parametrize("seed", random.sample(range(1 << 30), 4))
def test_any_interleaving_gives_the_same_tokens(seed: int, fetch: bool) -> None:
    rng = random.Random(seed)
    pool = PagePool(24)
    machine = scheduler(pool, fetch=fetch)
    rank = Rank(machine, pool, rng)
    wanted: dict[str, list[int]] = {}
    shared = [rng.randrange(50) for _ in range(20)]
    for number in range(30):
        prompt = shared[: rng.randrange(20)] + [rng.randrange(50) for _ in range(rng.randint(1, 9))]
        max_tokens = rng.randint(1, 20)
        tokens = list(prompt)
        for _ in range(max_tokens):
            tokens.append(next_token(tokens))
        wanted[f"r{number}"] = tokens[len(prompt) :]
        machine.submit(request(f"r{number}", prompt, max_tokens))
    for _ in range(5000):
        if machine.is_idle:
            break
        plan = rank.run_pass(abort=rng.random() < 0.1)
        assert plan.num_tokens <= 16
        rank.settle()
        pool.check_conservation()
    assert rank.emitted == wanted
    assert rank.finished == wanted.keys()
    pool.release([store.page for store in rank.stores])
    assert pool.usage().held == 0
    assert machine.num_preemptions > 0


@pytest.mark.parametrize("seed", random.sample(range(1 << 30), 3))
def test_cancel_at_any_moment_leaks_no_page(seed: int) -> None:
    rng = random.Random(seed)
    pool = PagePool(16)
    machine = scheduler(pool, fetch=True)
    rank = Rank(machine, pool, rng)
    for number in range(60):
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 20))]
        machine.submit(request(f"r{number}", prompt, rng.randint(1, 8)))
        rank.run_pass(abort=False)
        rank.settle()
        if rng.random() < 0.5:
            names = list(machine.request_ids())
            if names:
                name = rng.choice(names)
                assert machine.cancel(name)
                assert not machine.cancel(name)
        pool.check_conservation()
    machine.drop_all()
    for fetch in rank.fetches:
        machine.fetched(fetch.request_id, 0)
    pool.release([store.page for store in rank.stores])
    assert machine.is_idle
    assert pool.usage().held == 0


def test_decodes_go_before_prefill_chunks() -> None:
    machine = scheduler(PagePool(64), budget=8)
    machine.submit(request("long", list(range(30)), 1))
    plan, _ = machine.plan()
    assert [(c.start, c.count) for c in plan.chunks] == [(0, 8)]
    machine.complete(plan, [])
    machine.submit(request("short", [1], 5))
    plan, _ = machine.plan()
    assert [(c.request.request_id, c.count) for c in plan.chunks] == [("short", 1), ("long", 7)]


def test_second_request_reuses_the_prefix_but_computes_its_last_token() -> None:
    pool = PagePool(64)
    machine = scheduler(pool)
    rank = Rank(machine, pool, random.Random(0))
    machine.submit(request("first", list(range(8)), 1))
    rank.run_pass(abort=False)
    machine.submit(request("second", list(range(8)), 1))
    plan = rank.run_pass(abort=False)
    assert [(c.start, c.count) for c in plan.chunks] == [(4, 4)]
    assert rank.emitted["first"] == rank.emitted["second"]


def test_continuation_goes_on_where_the_other_rank_stopped() -> None:
    pool = PagePool(64)
    machine = scheduler(pool)
    rank = Rank(machine, pool, random.Random(0))
    prompt = [1, 2, 3]
    tokens = list(prompt)
    for _ in range(6):
        tokens.append(next_token(tokens))
    continued = request("moved", tokens[:5], 6)
    continued.num_prompt = 3
    machine.submit(continued)
    rank.emitted["moved"] = tokens[3:5]
    while not machine.is_idle:
        rank.run_pass(abort=False)
    assert rank.emitted["moved"] == tokens[3:]
