"""The corner cases of token dispatch, as checks that every rank of a pool runs.

Each takes the member and a seed, and asserts on its own rank against `moe_reference`; the numbers
are those of `tests/multiprocess/dispatch/test_corner_cases.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from configs.schema import MissingExperts
from dispatch import (
    CallOrder,
    CapacityExceeded,
    Dispatcher,
    DispatchLayout,
    ExpertMap,
    ExpertUnowned,
    InputInvalid,
    StaleEpoch,
)
from tests.support.moe_reference import (
    draw_map,
    draw_tokens,
    identity_expert,
    reference,
    run_experts,
    run_layer,
)
from tests.support.rank_pool import Member

Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def layout_of(**change: object) -> DispatchLayout:
    fields = {"hidden": 40, "topk": 4, "num_logical": 9, "num_layers": 1, "max_tokens": 12}
    return DispatchLayout(**{**fields, "dtype": torch.bfloat16, **change})


def check_exchange(dispatcher: Dispatcher, tokens: Tokens, **options: object) -> torch.Tensor:
    """One pass of one layer; the bits are those of one token at a time."""
    dispatcher.begin_pass()
    out = run_layer(dispatcher, *tokens, 0, **options)
    dispatcher.end_pass()
    assert torch.equal(out, reference(*tokens, 0, **options))
    return out


def counted(dispatcher: Dispatcher) -> tuple[int, int]:
    found = dispatcher.statistics()
    return int(found.routed.sum()), int(found.received.sum())


def case_01_no_tokens(member: Member, seed: int) -> None:
    layout, generator = layout_of(), member.generator(seed)
    with member.dispatcher(layout) as mine:
        world = member.world_size
        idle: Sequence[set[int]] = ({0}, set(range(1, world)), set(range(world)))
        for without in idle:
            num_tokens = 0 if member.rank in without else 5
            out = check_exchange(mine, draw_tokens(layout, num_tokens, generator))
            assert out.shape == (num_tokens, layout.hidden)
        assert mine.statistics().tokens == 5 * sum(member.rank not in w for w in idle)


def case_02_one_hot_expert(member: Member, seed: int) -> tuple[int, int]:
    layout, generator = layout_of(max_tokens=64, topk=2), member.generator(seed)
    hot = seed % layout.num_logical
    with member.dispatcher(layout) as mine:
        check_exchange(mine, draw_tokens(layout, 64, generator, masked=0, hot=hot))
        return counted(mine)


def case_03_one_rank(member: Member, seed: int) -> None:
    layout, generator = layout_of(), member.generator(seed)
    ranks = member.ranks(member.world_size)
    spread = ExpertMap.even(num_layers=1, num_logical=9, ranks=ranks)
    with member.dispatcher(layout, spread) as mine:
        for target in (lambda _: 0, lambda r: r, lambda r: (r + 1) % len(ranks)):
            experts = torch.tensor(spread.experts_of(target(member.rank), 0))
            x, ids, weights = draw_tokens(layout, 7, generator, masked=0)
            ids = experts[ids % len(experts)].contiguous()
            check_exchange(mine, (x, ids, weights))


def case_04_duplicate_experts(member: Member, seed: int) -> None:
    layout, generator = layout_of(topk=4), member.generator(seed)
    x, _, weights = draw_tokens(layout, 3, generator)
    ids = torch.tensor([[5, 5, 5, 5], [0, 8, 0, 8], [2, -1, 2, 3]])
    with member.dispatcher(layout) as mine:
        mine.begin_pass()
        arrived, handle = mine.dispatch(x, ids, weights, layer=0)
        assert sum(arrived.counts) == len(arrived.rows)
        out = mine.combine(run_experts(arrived.rows, arrived.counts, arrived.experts, 0), handle)
        assert torch.equal(out, reference(x, ids, weights, 0)), "every choice counts"
        assert counted(mine)[0] == 11


BAD_IDS = (9, 10, 1 << 40, -2, -9, -(1 << 62))


def case_05_masked_and_invalid(member: Member, seed: int) -> None:
    layout, generator = layout_of(), member.generator(seed)
    with member.dispatcher(layout) as mine:
        for masked in (0.3, 1.0, float(member.rank == 0)):
            x, ids, weights = draw_tokens(layout, 6, generator, masked=masked)
            ids[2] = -1
            out = check_exchange(mine, (x, ids, weights))
            assert not out[2].any()
        valid = counted(mine)[0]
        mine.begin_pass()
        x, ids, weights = draw_tokens(layout, 6, generator)
        for bad in BAD_IDS:
            spoilt = ids.clone()
            spoilt[3, 1] = bad
            with pytest.raises(InputInvalid, match="topk_ids"):
                mine.dispatch(x, spoilt, weights, layer=0)
        assert counted(mine)[0] == valid, "nothing was counted, nothing sent"
        assert torch.equal(run_layer(mine, x, ids, weights, 0), reference(x, ids, weights, 0))


def case_06_uneven_tokens(member: Member, seed: int) -> None:
    layout, generator = layout_of(), member.generator(seed)
    most = layout.max_tokens
    with member.dispatcher(layout) as mine:
        for step in range(6):
            num_tokens = (1, most, (member.rank * 5 + step * 3) % (most + 1))[step % 3]
            check_exchange(mine, draw_tokens(layout, num_tokens, generator))
        mine.begin_pass()
        if member.rank == 0:
            with pytest.raises(CapacityExceeded):
                mine.dispatch(*draw_tokens(layout, most + 1, generator), layer=0)
        # Nothing was sent: the refused rank corrects itself and nobody is left waiting.
        tokens = draw_tokens(layout, most, generator)
        assert torch.equal(run_layer(mine, *tokens, 0), reference(*tokens, 0))


def case_07_many_choices(member: Member, seed: int) -> None:
    for topk, num_logical in ((1, 9), (9, 9), (7, 8), (40, 60)):
        layout = layout_of(topk=topk, num_logical=num_logical, max_tokens=4)
        generator = member.generator(seed)
        with member.dispatcher(layout) as mine:
            x, ids, weights = draw_tokens(layout, 4, generator, masked=0)
            if topk == num_logical:
                ids = torch.arange(topk).expand(4, topk).contiguous()
            check_exchange(mine, (x, ids, weights))


def case_08_any_number_of_experts_and_ranks(member: Member, seed: int) -> None:
    for num_logical, world in ((7, 3), (60, 5), (100, 6), (160, 3), (257, 5), (2, 5), (1, 6)):
        layout = layout_of(num_logical=num_logical, topk=min(4, num_logical))
        with member.dispatcher(layout, ranks=member.ranks(world)) as mine:
            if mine is not None:
                check_exchange(mine, draw_tokens(layout, 5, member.generator(seed)))


def case_09_hidden_sizes(member: Member, seed: int) -> None:
    for hidden in (1, 128, 200, 1536, 2880, 5120, 7168, 7296, 7301):
        layout = layout_of(hidden=hidden, max_tokens=3, topk=3)
        with member.dispatcher(layout, ranks=member.ranks(2)) as mine:
            if mine is not None:
                check_exchange(mine, draw_tokens(layout, 3, member.generator(seed)))


def case_10_order_of_the_sum(member: Member, seed: int) -> list[torch.Tensor]:
    """Values whose sum depends on the order; the same tokens on every rank and rank count."""
    layout = layout_of(topk=6, hidden=64, num_logical=12)
    generator = torch.Generator().manual_seed(seed)
    x, ids, weights = draw_tokens(layout, 9, generator, masked=0.1)
    weights *= torch.tensor([1e6, 1.0, -1e6, 1e-3, 1e6, -1e6])
    found = []
    for world in (1, 2, 3, 6):
        ranks = member.ranks(world)
        placed = draw_map(layout, ranks, torch.Generator().manual_seed(seed + world))
        with member.dispatcher(layout, placed, ranks) as mine:
            if mine is not None:
                found.append(check_exchange(mine, (x, ids, weights)))
    assert all(torch.equal(found[0], out) for out in found)
    return found


def case_11_twice_the_same(member: Member, seed: int) -> None:
    layout = layout_of()
    tokens = draw_tokens(layout, 12, member.generator(seed))
    with member.dispatcher(layout) as mine:
        mine.begin_pass()
        seen = []
        for _ in range(2):
            arrived, handle = mine.dispatch(*tokens, layer=0)
            out = mine.combine(arrived.rows, handle)
            seen.append((arrived.counts, arrived.rows.clone(), out))
        assert seen[0][0] == seen[1][0]
        assert torch.equal(seen[0][1], seen[1][1]), "the order of the rows too"
        assert torch.equal(seen[0][2], seen[1][2])


def case_16_groups_of_experts(member: Member, seed: int) -> None:
    """Groups are packed: they begin where the one before ends, empty ones included."""
    layout = layout_of(topk=1, hidden=1, dtype=torch.float32, max_tokens=64)
    hot = torch.tensor([8, 0, 8, 3])
    with member.dispatcher(layout) as mine:
        for num_tokens in (1, 8, 16, 64):
            ids = hot.repeat(16)[:num_tokens].view(-1, 1)
            mine.begin_pass()
            arrived, handle = mine.dispatch(
                ids.float(), ids.contiguous(), torch.ones(num_tokens, 1), layer=0
            )
            want = torch.tensor(arrived.experts).repeat_interleave(torch.tensor(arrived.counts))
            assert torch.equal(arrived.rows.flatten(), want.float())
            mine.combine(arrived.rows, handle)
            mine.end_pass()


def case_17_handle_is_used_once(member: Member, seed: int) -> None:
    layout = layout_of()
    with member.dispatcher(layout) as mine:
        mine.begin_pass()
        tokens = draw_tokens(layout, 5, member.generator(seed))
        arrived, handle = mine.dispatch(*tokens, layer=0)
        for spoilt in (arrived.rows[:-1], arrived.rows[:, :-1].contiguous(), arrived.rows.double()):
            if len(arrived.rows):
                with pytest.raises(InputInvalid):
                    mine.combine(spoilt, handle)
        mine.combine(arrived.rows, handle)
        with pytest.raises(StaleEpoch):
            mine.combine(arrived.rows, handle)
        # The same routing with other rows is another dispatch, with the bits of a fresh one.
        again = (torch.randn(5, 40).bfloat16(), *tokens[1:])
        assert torch.equal(run_layer(mine, *again, 0), reference(*again, 0))


def case_18_handle_of_an_older_group(member: Member, seed: int) -> None:
    layout, generator = layout_of(), member.generator(seed)
    with member.dispatcher(layout) as old:
        old.begin_pass()
        arrived, handle = old.dispatch(*draw_tokens(layout, 4, generator), layer=0)
        old.combine(arrived.rows, handle)
    with member.dispatcher(layout, ranks=member.ranks(2)) as new:
        if new is not None:
            new.begin_pass()
            with pytest.raises(StaleEpoch):
                new.combine(arrived.rows, handle)
            tokens = draw_tokens(layout, 4, generator)
            assert torch.equal(run_layer(new, *tokens, 0), reference(*tokens, 0))


def case_19_shared_expert_is_added_once(member: Member, seed: int) -> None:
    layout = layout_of()
    with member.dispatcher(layout) as mine:
        mine.begin_pass()
        x, ids, weights = draw_tokens(layout, 6, member.generator(seed))
        arrived, handle = mine.dispatch(x, ids, weights, layer=0)
        shared = x * 2  # in the gap: nothing of it travels, so no rank count can multiply it
        routed = mine.combine(run_experts(arrived.rows, arrived.counts, arrived.experts, 0), handle)
        assert torch.equal(routed + shared, reference(x, ids, weights, 0) + x * 2)


def case_27_tensors_of_another_kind(member: Member, seed: int) -> None:
    layout = layout_of()
    x, ids, weights = draw_tokens(layout, 6, member.generator(seed))
    spoilt = {
        "shape of x": (x[:, :-1].contiguous(), ids, weights),
        "dtype of x": (x.float(), ids, weights),
        "device of x": (x.to("meta"), ids, weights),
        "stride of x": (x.t().contiguous().t(), ids, weights),
        "shape of topk_ids": (x, ids[:-1], weights),
        "dtype of topk_ids": (x, ids.int(), weights),
        "stride of topk_ids": (x, ids.t().contiguous().t(), weights),
        "shape of topk_weights": (x, ids, weights[:, 1:].contiguous()),
        "dtype of topk_weights": (x, ids, weights.bfloat16()),
        "device of topk_weights": (x, ids, weights.to("meta")),
    }
    with member.dispatcher(layout) as mine:
        mine.begin_pass()
        for name, arguments in spoilt.items():
            with pytest.raises(InputInvalid, match=name):
                mine.dispatch(*arguments, layer=0)
        for layer in (-1, 1):
            with pytest.raises(InputInvalid, match="layer"):
                mine.dispatch(x, ids, weights, layer=layer)
        # A start that no word of the machine is aligned to is accepted.
        odd = torch.empty(6 * 40 + 1, dtype=torch.bfloat16)[1:].view(6, 40).copy_(x)
        assert torch.equal(run_layer(mine, odd, ids, weights, 0), reference(x, ids, weights, 0))


def case_28_many_exchanges_on_two_dispatchers(member: Member, seed: int) -> None:
    """What a captured graph would do: the same buffers again and again, routing changes."""
    layouts = (layout_of(), layout_of(topk=2, hidden=24))
    generator = member.generator(seed)
    with member.dispatcher(layouts[0]) as first, member.dispatcher(layouts[1]) as second:
        for step in range(40):
            for dispatcher, layout in zip((first, second), layouts, strict=True):
                num_tokens = (step + member.rank) % 4
                check_exchange(dispatcher, draw_tokens(layout, num_tokens, generator))


def case_29_weights_of_missing_experts(member: Member, seed: int) -> None:
    layout, ranks = layout_of(), member.ranks(3)
    whole = ExpertMap.even(num_layers=1, num_logical=9, ranks=[*ranks, 40])
    lost = set(whole.experts_of(40, 0))
    x, ids, _ = draw_tokens(layout, 8, member.generator(seed), masked=0.2)
    ids[0, 0] = min(lost)
    weights = torch.full(ids.shape, 0.25)
    gone = torch.isin(ids, torch.tensor(sorted(lost)))
    with member.dispatcher(layout, whole, ranks) as mine:
        if mine is not None:
            mine.begin_pass()
            with pytest.raises(ExpertUnowned) as caught:
                mine.dispatch(x, ids, weights, layer=0)
            assert set(caught.value.experts) == set(ids[gone].tolist())
    with member.dispatcher(layout, whole, ranks, missing_experts=MissingExperts.DEGRADE) as mine:
        if mine is not None:
            mine.begin_pass()
            arrived, handle = mine.dispatch(x, ids, weights, layer=0)
            assert handle.num_degraded == int(gone.sum())
            rows = run_experts(arrived.rows, arrived.counts, arrived.experts, 0)
            out = mine.combine(rows, handle)
            kept = torch.where(gone, -1, ids)
            num_before, num_after = (ids >= 0).sum(1), (kept >= 0).sum(1)
            scale = num_before * 0.25 / (num_after.clamp(min=1) * 0.25)  # the sum of weights stays
            scaled = torch.where(kept >= 0, 0.25 * scale[:, None], 0.0).float()
            assert torch.equal(out, reference(x, kept, scaled, 0))


def case_30_redundant_experts(member: Member, seed: int) -> tuple[int, int]:
    """Three instances of everything, and a shared expert as the last id: each computed once."""
    layout = layout_of(num_logical=10, topk=5)
    ranks = member.ranks(member.world_size)
    placed = ExpertMap(
        num_layers=1,
        num_logical=10,
        placement={
            r: (tuple(e for e in range(10) if e == 9 or (e - r) % len(ranks) < 3),) for r in ranks
        },
    )
    x, ids, weights = draw_tokens(layout, 6, member.generator(seed), masked=0.1)
    ids[:, 4], weights[:, 4] = 9, 1.0
    with member.dispatcher(layout, placed) as mine:
        check_exchange(mine, (x, ids, weights))
        return counted(mine)


def case_31_uninitialised_memory(member: Member, seed: int) -> None:
    """Fresh memory filled with NaN changes nothing."""
    layout = layout_of()
    with member.dispatcher(layout) as mine:
        # What `torch.use_deterministic_algorithms` does after an import that takes ten seconds.
        torch._C._set_deterministic_algorithms(True)
        try:
            assert torch.utils.deterministic.fill_uninitialized_memory
            check_exchange(mine, draw_tokens(layout, 9, member.generator(seed), masked=0.5))
        finally:
            torch._C._set_deterministic_algorithms(False)


def skewed(layout: DispatchLayout, num_tokens: int, generator: torch.Generator) -> Tokens:
    """Choices of a Zipf distribution, distinct within a token."""
    x, _, weights = draw_tokens(layout, num_tokens, generator)
    odds = 1.0 / torch.arange(1, layout.num_logical + 1) ** 1.2
    odds = odds.expand(max(1, num_tokens), -1)
    ids = torch.multinomial(odds, layout.topk, generator=generator)[:num_tokens]
    return x, ids.contiguous(), weights


def case_32_conservation(member: Member, seed: int) -> tuple[int, int, int]:
    layout = layout_of(num_logical=16, topk=4)
    generator = member.generator(seed)
    placed = draw_map(layout, member.ranks(member.world_size), torch.Generator().manual_seed(seed))
    num_valid = 0
    with member.dispatcher(layout, placed) as mine:
        for masked in (0.0, 0.5):
            x, ids, _ = skewed(layout, 10, generator)
            if masked:
                ids[:, 2:] = -1  # two of four: weights that add up to 1 exactly
            valid = (ids >= 0).sum(1, keepdim=True)
            weights = (1.0 / valid).expand(ids.shape).contiguous()
            mine.begin_pass()
            out = run_layer(mine, x, ids, weights, 0, identity_expert)
            mine.end_pass()
            assert torch.equal(out, x), "identity experts with weights 1/k return the input"
            num_valid += int(valid.sum())
        return (num_valid, *counted(mine))


def refused(error: type[Exception], call: Callable[[], object]) -> None:
    with pytest.raises(error):
        call()


def case_20_one_at_a_time(member: Member, seed: int) -> None:
    """Without the halves a second dispatch before the combine is refused, the first goes on."""
    layout = layout_of()
    with member.dispatcher(layout) as mine:
        mine.begin_pass()
        tokens = draw_tokens(layout, 4, member.generator(seed))
        arrived, handle = mine.dispatch(*tokens, layer=0)
        refused(CallOrder, lambda: mine.dispatch(*tokens, layer=0))
        refused(CallOrder, mine.end_pass)
        rows = run_experts(arrived.rows, arrived.counts, arrived.experts, 0)
        assert torch.equal(mine.combine(rows, handle), reference(*tokens, 0))
