"""DeepEP's calls against a reference that sees all ranks' tokens at once, on every backend."""

from __future__ import annotations

import pytest
import torch

from configs.schema import DispatchConfig
from dispatch import CallOrder, CapacityExceeded, InputInvalid, Unsupported
from dispatch.deepep import Alone, Buffer, ByCollective, ByTransfer, Config, EventOverlap
from dispatch.deepep.fp8_rows import exponents, to_fp8
from tests.support.rank_pool import BACKENDS, WAIT_S, Member, RankPool, rank_pool

WORLD = 3
M, H, K, E = 10, 512, 4, 12
_carriers: dict[int, ByTransfer] = {}


@pytest.fixture(scope="module", params=BACKENDS)
def pool(request):
    with rank_pool(request.param, WORLD) as started:
        yield started


def buffer_of(member: Member) -> Buffer:
    if member.backend == "local":
        return Buffer(Alone(), max_tokens=M)
    if member.backend == "gloo":
        return Buffer(max_tokens=M)
    if member.rank not in _carriers:
        assert member.engine is not None

        def swap(offers):
            given = member.meet(value=offers)
            return {r: given[r][member.rank] for r in given if r != member.rank}

        _carriers[member.rank] = ByTransfer(
            member.engine,
            DispatchConfig(pass_timeout_s=WAIT_S),
            rank=member.rank,
            members={rank: member.name_of(rank) for rank in range(member.world_size)},
            swap=swap,
        )
    return Buffer(_carriers[member.rank], max_tokens=M)


def tokens_of(rank: int, seed: int, *, num_experts: int = E, hidden: int = H):
    """Any rank's tokens; ranks have different numbers of them, one may have none."""
    generator = torch.Generator().manual_seed(seed + rank)
    num_tokens = (seed + 4 * rank) % (M + 1)
    x = torch.randn(num_tokens, hidden, generator=generator).bfloat16()
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    ids = scores.argsort(1)[:, :K].contiguous()
    ids[torch.rand(ids.shape, generator=generator) < 0.15] = -1
    return x, ids, torch.rand(ids.shape, generator=generator)


def experts_of(rank: int, world: int, num_experts: int = E) -> list[int]:
    """As numpy splits a list; DeepEP knows the case without a remainder only."""
    return torch.arange(num_experts).tensor_split(world)[rank].tolist()


def arrivals(rank: int, world: int, seed: int, num_experts: int = E):
    """Per local expert: (source, token) of each row, in order."""
    found = []
    for expert in experts_of(rank, world, num_experts):
        found.append(
            [
                (source, token)
                for source in range(world)
                for token, row in enumerate(tokens_of(source, seed, num_experts=num_experts)[1])
                for chosen in row.tolist()
                if chosen == expert
            ]
        )
    return found


def weighted(rank: int, seed: int, factor, num_experts: int = E) -> torch.Tensor:
    """Experts multiply by `factor(expert)`; summed in fp32, k ascending, cast once."""
    x, ids, weights = tokens_of(rank, seed, num_experts=num_experts)
    out = torch.zeros_like(x)
    for t in range(len(x)):
        total = torch.zeros(x.shape[1])
        for k in range(K):
            if ids[t, k] >= 0:
                row = (x[t].float() * factor(int(ids[t, k]))).bfloat16()
                total += row.float() * weights[t, k]
        out[t] = total.bfloat16()
    return out


def scaled(recv_x: torch.Tensor, counts: torch.Tensor, experts: list[int], factor) -> torch.Tensor:
    out = torch.full_like(recv_x, torch.nan)  # what is behind the rows must not matter
    for i, expert in enumerate(experts):
        n = int(counts[i])
        out[i, :n] = (recv_x[i, :n].float() * factor(expert)).bfloat16()
    return out


def factor_of(expert: int) -> float:
    return 1.0 + 0.31 * expert


def check_low_latency(member: Member, seed: int, num_experts: int) -> None:
    buffer, world = buffer_of(member), member.world_size
    x, ids, weights = tokens_of(member.rank, seed, num_experts=num_experts)
    mine = experts_of(member.rank, world, num_experts)
    stats = torch.zeros(len(mine), dtype=torch.int32)
    recv_x, count, handle, event, hook = buffer.low_latency_dispatch(
        x, ids, M, num_experts, stats, use_fp8=False
    )
    assert isinstance(event, EventOverlap)
    assert hook is None
    assert (recv_x.shape, recv_x.dtype) == ((len(mine), M * world, H), torch.bfloat16)
    assert (count.shape, count.dtype) == ((len(mine),), torch.int32)
    src_info, layout_range, *sizes = handle[:5]
    assert sizes == [M, H, num_experts]
    assert (src_info.shape, src_info.dtype) == ((len(mine), M * world), torch.int32)
    assert (layout_range.shape, layout_range.dtype) == ((len(mine), world), torch.int64)
    assert torch.equal(stats, count)
    for i, want in enumerate(arrivals(member.rank, world, seed, num_experts)):
        assert int(count[i]) == len(want)
        assert src_info[i, : len(want)].tolist() == [token for _, token in want]
        for row, (source, token) in enumerate(want):
            sent = tokens_of(source, seed, num_experts=num_experts)[0][token]
            assert torch.equal(recv_x[i, row], sent)
        for source in range(world):
            begin, num = (
                int(layout_range[i, source]) >> 32,
                int(layout_range[i, source]) & 0xFFFFFFFF,
            )
            assert [s for s, _ in want[begin : begin + num]] == [source] * num
        assert int((layout_range[i] & 0xFFFF_FFFF).sum()) == len(want)
    y = scaled(recv_x, count, mine, factor_of)
    place = buffer.get_next_low_latency_combine_buffer(handle).copy_(y)
    out, _, hook = buffer.low_latency_combine(place, ids, weights, handle, zero_copy=True)
    assert hook is None
    assert torch.equal(out, weighted(member.rank, seed, factor_of, num_experts))
    buffer.destroy()
    buffer.destroy()


@pytest.mark.parametrize("num_experts", [E, 7, 4])
def test_low_latency_rows_tables_and_sums(pool: RankPool, seed: int, num_experts: int):
    pool.run(check_low_latency, seed, num_experts)


def check_hooks(member: Member, seed: int) -> None:
    """20: two exchanges in flight, hooks in either order; a third is refused, the two are right."""
    buffer, mine = buffer_of(member), experts_of(member.rank, member.world_size)
    seeds = [seed, seed + 1000]
    for order in ((0, 1), (1, 0)):
        sent = []
        for each in seeds:
            x, ids, weights = tokens_of(member.rank, each)
            recv_x, count, handle, _, hook = buffer.low_latency_dispatch(
                x, ids, M, E, use_fp8=False, return_recv_hook=True
            )
            sent.append((recv_x, count, handle, hook, ids, weights))
        with pytest.raises(CallOrder):
            buffer.low_latency_dispatch(*tokens_of(member.rank, seed)[:2], M, E)
        recv_x, _, handle, _, ids, weights = sent[0]
        with pytest.raises(CallOrder, match="hook"):
            buffer.low_latency_combine(recv_x, ids, weights, handle)
        for i in order:
            sent[i][3]()
            sent[i][3]()
        done = []
        for i in order:
            recv_x, count, handle, _, ids, weights = sent[i]
            y = scaled(recv_x, count, mine, factor_of)
            out = torch.empty(len(ids), H, dtype=torch.bfloat16)
            given, _, hook = buffer.low_latency_combine(
                y, ids, weights, handle, return_recv_hook=True, out=out
            )
            assert given is out
            done.append((i, out, hook, y))
        for i, out, hook, _ in reversed(done):
            hook()
            hook()
            assert torch.equal(out, weighted(member.rank, seeds[i], factor_of))
    buffer.destroy()


def test_case_20_two_exchanges_in_flight(pool: RankPool, seed: int):
    pool.run(check_hooks, seed)


def check_fp8(member: Member, seed: int, round_scale: bool, packed: bool) -> None:
    buffer, world = buffer_of(member), member.world_size
    x, ids, weights = tokens_of(member.rank, seed)
    (rows, scales), _, handle, _, hook = buffer.low_latency_dispatch(
        x, ids, M, E, round_scale=round_scale, use_ue8m0=packed, return_recv_hook=True
    )
    hook()
    num_local, slab = len(experts_of(member.rank, world)), M * world
    assert (rows.shape, rows.dtype) == ((num_local, slab, H), torch.float8_e4m3fn)
    width, kind = (H // 512, torch.int32) if packed else (H // 128, torch.float32)
    assert (scales.shape, scales.dtype) == ((num_local, slab, width), kind)
    assert scales.stride()[1] == 1, "column-major"
    for i, want in enumerate(arrivals(member.rank, world, seed)):
        for row, (source, token) in enumerate(want):
            sent = tokens_of(source, seed)[0][token].float().view(-1, 128)
            amax = sent.abs().amax(1).clamp(min=1e-4)
            factors = torch.exp2(torch.ceil(torch.log2(amax / 448))) if round_scale else amax / 448
            if packed:
                found = scales[i, row].contiguous().view(torch.uint8).int()
                assert torch.equal(found, (torch.log2(factors) + 127).int())
            else:
                assert torch.equal(scales[i, row], factors)
            back = rows[i, row].float().view(-1, 128) * factors[:, None]
            assert (back - sent).abs().max() <= amax.max() / 16, "three bits of mantissa"
    buffer.low_latency_combine(buffer.get_next_low_latency_combine_buffer(handle).zero_(),
                               ids, weights, handle)  # fmt: skip
    buffer.destroy()


@pytest.mark.parametrize(("round_scale", "packed"), [(False, False), (True, False), (True, True)])
def test_case_14_layouts_of_scales(pool: RankPool, seed: int, round_scale: bool, packed: bool):
    pool.run(check_fp8, seed, round_scale, packed)


def check_refusals(member: Member, seed: int) -> None:
    buffer = buffer_of(member)
    x, ids, weights = tokens_of(member.rank, seed)
    dispatch = buffer.low_latency_dispatch
    cost = torch.zeros(member.world_size, dtype=torch.int64)
    narrow = x[:, :200].contiguous()
    wide = torch.zeros(M + 1, H, dtype=torch.bfloat16), torch.zeros(M + 1, K, dtype=torch.int64)
    refused = [
        (Unsupported, lambda: dispatch(x, ids, M, E, dispatch_wait_recv_cost_stats=cost)),
        (Unsupported, lambda: dispatch(x, ids, M, E, async_finish=True, return_recv_hook=True)),
        (Unsupported, lambda: dispatch(x, ids, M, E, use_ue8m0=True)),
        (InputInvalid, lambda: dispatch(narrow, ids, M, E)),
        (InputInvalid, lambda: dispatch(x.float(), ids, M, E)),
        (InputInvalid, lambda: dispatch(x, ids.int(), M, E)),
        (InputInvalid, lambda: dispatch(x.flatten(), ids, M, E)),
        (CapacityExceeded, lambda: dispatch(*wide, M, E, use_fp8=False)),
        (Unsupported, lambda: buffer.low_latency_update_mask_buffer(0, True)),
        (Unsupported, lambda: buffer.disconnect_ranks([0])),
        (Unsupported, lambda: buffer.connect_ranks([member.world_size])),
        (Unsupported, lambda: buffer.update_memory_buffers(member.world_size + 1, 4)),
        (Unsupported, buffer.get_comm_stream),
        (Unsupported, lambda: buffer.get_local_buffer_tensor(torch.int8)),
        (Unsupported, lambda: Buffer(Alone(), enable_shrink=True)),
    ]
    for error, call in refused:
        with pytest.raises(error):
            call()
    buffer.connect_ranks(range(member.world_size))
    buffer.update_memory_buffers(member.world_size, E, 1 << 20)
    buffer.clean_low_latency_buffer(M, H, E)
    status = torch.ones(member.world_size, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    assert not status.any()
    recv_x, _, handle, _, _ = dispatch(x, ids, M, E, use_fp8=False)
    combine = buffer.low_latency_combine
    with pytest.raises(Unsupported):
        combine(recv_x, ids, weights, handle, use_logfmt=True)
    with pytest.raises(InputInvalid):
        combine(recv_x[:, 1:], ids, weights, handle)
    if len(ids):
        with pytest.raises(InputInvalid, match="topk_idx"):
            combine(recv_x, ids.roll(1, 1) - 1, weights, handle)
    out, _, _ = combine(recv_x, ids, weights, handle)
    assert torch.equal(out, weighted(member.rank, seed, lambda _: 1.0))
    buffer.destroy()


def test_what_is_not_there_is_refused_before_anything_is_sent(pool: RankPool, seed: int):
    pool.run(check_refusals, seed)


def placed_rows(rank: int, world: int, seed: int) -> list[tuple[int, int]]:
    """(source, token) of the rows that a rank gets in normal mode."""
    mine = experts_of(rank, world)
    return [
        (source, token)
        for source in range(world)
        for token, row in enumerate(tokens_of(source, seed)[1].tolist())
        if any(chosen in mine for chosen in row)
    ]


def check_normal(member: Member, seed: int, fp8: bool, worst: int, alignment: int) -> None:
    buffer, rank, world = buffer_of(member), member.rank, member.world_size
    x, ids, weights = tokens_of(rank, seed)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, E)
    mine, want = experts_of(rank, world), placed_rows(rank, world, seed)
    assert per_node is None
    assert per_expert.tolist() == [int((ids == e).sum()) for e in range(E)]
    assert torch.equal(per_rank, in_rank.sum(0).int())
    sent = to_fp8(x) if fp8 else x
    recv_x, recv_ids, recv_weights, listed, handle, _ = buffer.dispatch(
        sent,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=ids,
        topk_weights=weights,
        expert_alignment=alignment,
        num_worst_tokens=worst,
        config=Buffer.get_dispatch_config(world),
    )
    rows = recv_x[0].float() if fp8 else recv_x
    assert len(rows) == len(recv_ids) == len(recv_weights) == (worst or len(want))
    counts = torch.zeros(len(mine), dtype=torch.int64)
    for i, (source, token) in enumerate(want):
        theirs, chosen, shares = tokens_of(source, seed)
        if fp8:
            quantised, scales = to_fp8(theirs)
            assert torch.equal(rows[i], quantised[token].float())
            assert torch.equal(recv_x[1][i], scales[token])
        else:
            assert torch.equal(rows[i], theirs[token])
        for k, expert in enumerate(chosen[token].tolist()):
            here = expert in mine
            assert int(recv_ids[i, k]) == (mine.index(expert) if here else -1)
            assert float(recv_weights[i, k]) == (float(shares[token, k]) if here else 0.0)
            if here:
                counts[mine.index(expert)] += 1
    assert bool((recv_ids[len(want) :] == -1).all())
    assert listed == ([] if worst else [-(-n // alignment) * alignment for n in counts.tolist()])
    y = torch.full((len(rows), H), float(rank + 1)).bfloat16()
    biases = (torch.ones_like(x), torch.full_like(x, 2.0))
    out, shares, _ = buffer.combine(y, handle, recv_weights, biases, Config())
    totals = in_rank.float() @ torch.arange(1.0, world + 1)
    assert torch.equal(out, (totals[:, None] + 3.0).expand(-1, H).bfloat16())
    assert torch.equal(shares, torch.where(ids >= 0, weights, 0.0))
    with pytest.raises(CallOrder):
        buffer.combine(y, handle)
    # 17: the same routing again, other rows, by the handle alone.
    again = x * 2
    recv_x, *nothing, _ = buffer.dispatch(again, handle=handle)
    assert nothing == [None] * 4
    for i, (source, token) in enumerate(want):
        assert torch.equal(recv_x[i], tokens_of(source, seed)[0][token] * 2)
    assert torch.equal(buffer.combine(recv_x, handle)[0], again * in_rank.sum(1, keepdim=True))
    for spoilt in (
        lambda: buffer.dispatch(x[:, :128].contiguous(), handle=handle),
        lambda: buffer.dispatch(x, handle=handle, topk_idx=ids),
        lambda: buffer.dispatch(torch.zeros(M + 2, H).bfloat16(), handle=handle),
    ):
        with pytest.raises(InputInvalid):
            spoilt()
    buffer.destroy()


NORMAL = [
    *((fp8, 0, alignment) for fp8, alignment in ((False, 1), (True, 8), (False, 16), (True, 64))),
    *((fp8, 3 * M, 128) for fp8 in (False, True)),
]


@pytest.mark.parametrize(("fp8", "worst", "alignment"), NORMAL)
def test_case_16_and_17_normal_mode(
    pool: RankPool, seed: int, fp8: bool, worst: int, alignment: int
):
    pool.run(check_normal, seed, fp8, worst, alignment)


def test_values_of_no_consequence():
    assert Config().get_nvl_buffer_size_hint(1 << 14, 8) == 0
    assert Config(num_sms=4).get_rdma_buffer_size_hint(1 << 14, 8) == 0
    assert Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256) > 128 * 7168 * 2 * 7
    with Buffer.capture() as event:
        event.current_stream_wait()
    assert not Buffer.is_sm90_compiled()
    assert ByCollective.__doc__


def test_exponents_never_round_down():
    scales = torch.exp2(torch.empty(4096).uniform_(-120, 120))
    assert bool((torch.exp2(exponents(scales).double() - 127) >= scales.double()).all())
