"""Corner cases that concern what travels: bytes, rows in fp8, epochs, pressure, duplicates.

Those that need epochs are for the transfer engine only; the other backends have fixed members and
no such calls, which is asserted here too.
"""

from __future__ import annotations

import random
import time

import pytest
import torch

from configs.dispatch_options import DispatchWire
from configs.schema import DispatchConfig, TransferBackend, TransferConfig
from dispatch import CallOrder, ExpertMap, MessageMismatch, StaleEpoch, TransferDispatcher
from tests.support.corner_cases import check_exchange, layout_of
from tests.support.moe_reference import draw_tokens, reference, run_layer
from tests.support.rank_pool import WAIT_S, Member
from transfer import TransferEngine


def has_epochs(member: Member) -> bool:
    """Whether membership can change; else there is nothing that could be called."""
    if member.engine is None:
        with member.dispatcher(layout_of()) as mine:
            assert not hasattr(mine, "prepare")
            assert not hasattr(mine, "install")
    return member.engine is not None


def case_bytes_and_messages(member: Member, seed: int) -> None:
    """What docs/dispatch.md says, counted from the ids of all ranks."""
    layout, world = layout_of(num_logical=13), member.world_size
    spread = ExpertMap.even(num_layers=1, num_logical=13, ranks=range(world))
    ids_of = [draw_tokens(layout, 3 + r, _generator(seed, r))[1].tolist() for r in range(world)]

    def choices(source: int, receiver: int) -> tuple[int, int]:
        held = spread.experts_of(receiver, 0)
        here = [[c for c in row if c in held] for row in ids_of[source]]
        return sum(map(len, here)), sum(map(bool, here))

    want = 0
    for other in range(world):
        if other == member.rank:
            continue
        there, tokens = choices(member.rank, other)
        index_bytes = 4 * (len(spread.experts_of(other, 0)) + there)
        want += 64 + -(-index_bytes // 64) * 64 + tokens * 40 * 2
        want += 64 + choices(other, member.rank)[0] * 40 * 2
    with member.dispatcher(layout, spread) as mine:
        before = _immediates(member)
        check_exchange(mine, draw_tokens(layout, 3 + member.rank, _generator(seed, member.rank)))
        assert mine.statistics().sent_bytes == want
        if member.engine is not None:
            assert _immediates(member) - before == 2 * (world - 1)


def _generator(seed: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed + 104_729 * rank)


def _immediates(member: Member) -> int:
    if member.engine is None:
        return 0
    return sum(each.immediates for each in member.engine.statistics().backends.values())


def case_12_fp8_on_the_wire(member: Member, seed: int) -> None:
    """Zeros stay zeros, what is not finite shows in its token alone; the tail group has a scale."""
    for hidden in (128, 200):
        layout = layout_of(hidden=hidden, dispatch_wire=DispatchWire.FP8)
        with member.dispatcher(layout) as mine:
            x, ids, weights = draw_tokens(layout, 6, member.generator(seed), masked=0)
            x[0], x[1, 3], x[2, 5], x[3, -1] = 0, torch.nan, torch.inf, 3.3e38
            mine.begin_pass()
            arrived, handle = mine.dispatch(x, ids, weights, layer=0)
            out = mine.combine(arrived.rows, handle)
            mine.end_pass()
            assert not out[0].any()
            assert not out[1, 3].isfinite()
            assert not out[2, 5].isfinite()
            others = torch.ones_like(out, dtype=torch.bool)
            others[1, 3] = others[2, 5] = False
            others[3] = False  # so large that the weighted sum may overflow
            assert bool(out[others].isfinite().all())
            total = x[4:].float() * weights[4:].sum(1, keepdim=True)
            assert bool(((out[4:] - total).abs() <= total.abs() / 8 + 0.02).all()), seed


def case_22_ranks_leave_and_join(member: Member, seed: int) -> None:
    """Any rank leaves, not only the last; others join; a new life of a rank has another name."""
    if not has_epochs(member):
        return
    assert member.engine is not None
    layout, generator = layout_of(), member.generator(seed)
    everybody = list(range(member.world_size))
    mine = TransferDispatcher(member.engine, DispatchConfig(pass_timeout_s=WAIT_S), layout=layout)
    handles = []
    for epoch, ranks in enumerate(([0, 1, 2], everybody, [0, 2, 3, 5], everybody), start=1):
        spread = ExpertMap.even(num_layers=1, num_logical=9, ranks=ranks)
        if member.rank not in ranks:
            member.meet(ranks)
            member.meet()
            continue
        member.install(mine, 1000 + epoch, ranks, spread)
        for arrived, handle in handles:
            with pytest.raises((StaleEpoch, CallOrder)):
                mine.combine(arrived.rows, handle)
        mine.begin_pass()
        tokens = draw_tokens(layout, member.rank + 1, generator)
        arrived, handle = mine.dispatch(*tokens, layer=0)
        handles.append((arrived, handle))
        mine.combine(arrived.rows, handle)
        mine.end_pass()
        check_exchange(mine, draw_tokens(layout, 4, generator))
        member.meet()
    mine.close()


def case_22_a_new_life_of_a_rank(member: Member, seed: int) -> None:
    """The same rank number with a new engine: no key of its old life is used."""
    if not has_epochs(member):
        return
    reborn = 1
    config = TransferConfig(backend=TransferBackend(member.backend))
    engine, layout = member.engine, layout_of()
    assert engine is not None
    names = {rank: member.name_of(rank) for rank in range(member.world_size)}
    names[reborn] = f"{seed & 0xFFFF_FFFF:016x}"
    if member.rank == reborn:
        engine = TransferEngine(config, name=names[reborn], secret=b"the secret of a pool")
        engine.open()
    assert engine is not None
    (address,) = [a for a in member.meet(value=_address(member, engine, reborn)).values() if a]
    if member.rank != reborn:
        engine.connect(address, timeout_s=WAIT_S)
    member.meet()
    mine = TransferDispatcher(engine, DispatchConfig(pass_timeout_s=WAIT_S), layout=layout)
    spread = ExpertMap.even(num_layers=1, num_logical=9, ranks=names)
    offers = mine.prepare(epoch=3000, rank=member.rank, members=names, expert_map=spread)
    given = member.meet(value=offers)
    mine.install({r: given[r][member.rank] for r in given if r != member.rank})
    for num_tokens in (0, 5, 12):
        check_exchange(mine, draw_tokens(layout, num_tokens, member.generator(seed)))
    member.meet()
    mine.close()
    if member.rank == reborn:
        engine.close()
    member.meet()


def _address(member: Member, engine: TransferEngine, reborn: int) -> str:
    return engine.address if member.rank == reborn else ""


def case_24_any_order_and_twice(member: Member, seed: int) -> None:
    """Peers' messages arrive in any order; one that arrives twice is seen for what it is."""
    layout, pause = layout_of(), random.Random(seed + member.rank)
    with member.dispatcher(layout) as mine:
        for _ in range(8):
            time.sleep(pause.random() * 0.02)
            check_exchange(mine, draw_tokens(layout, 5, member.generator(seed)))
    if member.engine is None:
        return
    with member.dispatcher(layout, ranks=[0, 1]) as mine:
        if mine is None:
            member.meet([0, 1])  # the others' meeting below
            return
        assert isinstance(mine, TransferDispatcher)
        check_exchange(mine, draw_tokens(layout, 5, member.generator(seed)))
        if member.rank == 1:
            assert mine._delivery is not None
            (route,) = mine._delivery._routes
            staged = mine._staging.parts[route.i][0]
            member.engine.write(
                route.name,
                staged.region,
                route.target.keys[0],
                staged.offset,
                route.target.offsets[0] + 64,  # anything but a header
                64,
                immediate=mine._delivery._waiting.immediates[0],
                timeout_s=WAIT_S,
            ).wait(WAIT_S)
        member.meet([0, 1])
        if member.rank == 0:
            mine.begin_pass()
            with pytest.raises(MessageMismatch, match="pass"):
                mine.dispatch(*draw_tokens(layout, 5, member.generator(seed)), layer=0)


def case_25_epochs_beyond_the_immediate(member: Member, seed: int) -> None:
    """An immediate has 24 bits of the epoch; the header has all of it."""
    if not has_epochs(member):
        return
    assert member.engine is not None
    layout, ranks = layout_of(), list(range(member.world_size))
    mine = TransferDispatcher(member.engine, DispatchConfig(pass_timeout_s=WAIT_S), layout=layout)
    spread = ExpertMap.even(num_layers=1, num_logical=9, ranks=ranks)
    for epoch in ((1 << 24) - 1, 1 << 24, (1 << 24) + 1, (1 << 32) + 1, (1 << 60) + 7):
        member.install(mine, epoch, ranks, spread)
        check_exchange(mine, draw_tokens(layout, 5, member.generator(seed)))
        member.meet()
    mine.close()


def case_26_more_than_any_queue_holds(member: Member, seed: int) -> None:
    """Megabytes to a reader that is late: sending waits, nothing is lost."""
    layout = layout_of(hidden=4096, topk=8, num_logical=16, max_tokens=48)
    with member.dispatcher(layout, ranks=member.ranks(3)) as mine:
        if mine is None:
            return
        mine.begin_pass()
        for step in range(3):
            tokens = draw_tokens(layout, 48, member.generator(seed + step), masked=0)
            if member.rank == step:
                time.sleep(0.2)
            out = run_layer(mine, *tokens, 0)
            some = slice(step, step + 3)
            assert torch.equal(out[some], reference(*(t[some] for t in tokens), 0))
        mine.end_pass()
