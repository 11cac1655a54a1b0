"""How one step's attention is cut into tiles of fixed shape: indices and masks for all layers.

Legend: T tokens, Hq and Hkv heads, G = Hq / Hkv, D head size, Q queries per tile, R = Q * G rows
per tile, N keys (padded), W sequences gathered at once, P pages gathered per sequence.

Problem: matrix kernels add in an order that depends on the shape of the product, so a query
computed alone and the same query inside a prefill chunk come out with different last bits.
Choice: the shape of every product a query takes part in is a function of its *position* alone.

    positions   0 . . Q | Q . . 2Q | 2Q . . 3Q |       a tile holds the queries of one run of Q
                                  ^p                   p always stands in slot p % Q of its tile
    keys        [ 0 .......... p ......... N )         N = p + 1 rounded up to KEY_BLOCK; the keys
                               visible | masked        after p are masked and add exact zeros

Slots of a tile without a query of this step repeat one that has: rows of a product don't influence
each other. Decoded queries use tiles of few rows, prefill chunks tiles of many; that both give the
same bits is measured (`PagedAttention`), and where they don't, the small tile serves both.
Alternatives: a native kernel that reads the pages in place (a trial in C with AVX-512 decoded about
twice as fast, prefilled at about the same speed, and needs a compiler on every rank, since its bits
are not those of torch); elementwise products and sums (they write more than the cache holds).
Costs: the padding of both, and one copy of the pages per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from moe_runtime.models.batch import ForwardBatch, SequenceSlice

#: keys are padded to a multiple of this; a power of two, at least as long as any tile
KEY_BLOCK = 128
#: rows of the tiles of decoded queries; with fewer, fp32 products take other code paths
DECODE_ROWS = 8
#: rows of the tiles of prefill chunks; more gain little, and the CPU kernel would split them
PREFILL_ROWS = 32
#: sequences decoded together share one gather of at most this size, which fits the caches
GATHER_BYTES_MAX = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What is fixed for the life of a model."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: torch.dtype

    @property
    def group_size(self) -> int:
        """G: query heads that share one key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def page_row(self) -> int:
        """Elements of one page's keys (or values) of one layer."""
        return self.page_tokens * self.num_kv_heads * self.head_dim

    @property
    def decode_queries(self) -> int:
        """Q of small tiles: the least power of two that fills `DECODE_ROWS`."""
        queries = 1
        while queries * self.group_size < DECODE_ROWS:
            queries *= 2
        return queries

    @property
    def prefill_queries(self) -> int:
        """Q of large tiles: the greatest power of two that fits `PREFILL_ROWS`, or the small Q."""
        queries = self.decode_queries
        while queries * 2 * self.group_size <= PREFILL_ROWS:
            queries *= 2
        return queries


@dataclass(frozen=True, slots=True, kw_only=True)
class TileCall:
    """One call of the kernel: tiles `[start, stop)` of their group against the first N keys.

    Attributes:
        mask: [stop - start, 1, R, N], added to the scores: 0 or -inf.
    """

    start: int
    stop: int
    num_keys: int
    mask: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """Pages copied side by side, and the calls that read them.

    Attributes:
        rows: [2 * W * P] int64: all key pages, then all value pages, as rows of the cache seen as
            `[num_pages * L * 2, page_row]`, for layer 0; layer l starts 2 * l rows later.
        stale: Rows of the copy, as `[2 * W * P * page_tokens, Hkv * D]`, that hold no token: they
            are zeroed, since whatever lies there (a NaN, say) must not meet a zero weight.
    """

    rows: torch.Tensor
    num_sequences: int
    num_pages: int
    stale: torch.Tensor | None
    calls: tuple[TileCall, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TileGroup:
    """Tiles of one shape: `query_rows` [tiles * Q] int64 is the batch row in each slot."""

    queries_per_tile: int
    query_rows: torch.Tensor
    gathers: tuple[Gather, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """The tiles of one batch.

    Attributes:
        output_slots: [T] int64, where each row's result is in the slots of all groups, end to end.
    """

    groups: tuple[TileGroup, ...]
    output_slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Tile:
    """The queries at positions [first, stop) of one sequence; slot 0 stands at `origin`."""

    sequence: SequenceSlice
    origin: int
    first: int
    stop: int

    @property
    def num_keys(self) -> int:
        return padded_keys(self.stop)


def padded_keys(num_keys: int) -> int:
    """Round a number of keys up to `KEY_BLOCK`."""
    return -(-num_keys // KEY_BLOCK) * KEY_BLOCK


def _aligned_tiles(sequence: SequenceSlice, queries: int) -> Iterator[_Tile]:
    first, stop = sequence.first_position, sequence.context_len
    for origin in range(first // queries * queries, stop, queries):
        yield _Tile(sequence, origin, max(first, origin), min(stop, origin + queries))


def plan_exact(
    batch: ForwardBatch, shape: AttentionShape, *, large_tiles_equal: Callable[[int], bool]
) -> AttentionPlan:
    """Cut a batch into tiles whose shapes depend on positions alone.

    Args:
        batch: The step.
        shape: Sizes of the model.
        large_tiles_equal: Whether, at this number of padded keys, a large tile is known to give the
            bits of a small one.
    """
    small, large = shape.decode_queries, shape.prefill_queries
    decoded: list[_Tile] = []
    chunks: dict[int, list[list[_Tile]]] = {small: [], large: []}
    for sequence in batch.sequences:
        tiles = list(_aligned_tiles(sequence, small))
        if len(tiles) == 1:
            decoded += tiles
            continue
        if large > small and all(large_tiles_equal(tile.num_keys) for tile in tiles):
            chunks[large].append(list(_aligned_tiles(sequence, large)))
        else:
            chunks[small].append(tiles)
    runs = {small: _decode_runs(decoded, shape)}
    for queries, prefills in chunks.items():
        runs.setdefault(queries, []).extend(prefills)
    return _build(batch, shape, list(runs.items()))


def plan_tolerant(batch: ForwardBatch, shape: AttentionShape) -> AttentionPlan:
    """Cut a batch into as few and as tight tiles as possible: one per sequence."""
    decoded: list[_Tile] = []
    runs: list[tuple[int, list[list[_Tile]]]] = []
    for sequence in batch.sequences:
        first, stop = sequence.first_position, sequence.context_len
        tile = _Tile(sequence, first, first, stop)
        if sequence.num_queries == 1:
            decoded.append(tile)
        else:
            runs.append((sequence.num_queries, [[tile]]))
    return _build(batch, shape, [(1, _decode_runs(decoded, shape)), *runs])


def _decode_runs(tiles: list[_Tile], shape: AttentionShape) -> list[list[_Tile]]:
    """Put tiles of different sequences with the same number of keys together, within the budget."""
    runs: list[list[_Tile]] = []
    by_keys = sorted(tiles, key=lambda tile: tile.num_keys)
    for num_keys, same in groupby(by_keys, key=lambda tile: tile.num_keys):
        pages = -(-num_keys // shape.page_tokens)
        sequence_bytes = 2 * pages * shape.page_row * shape.dtype.itemsize
        most = max(1, GATHER_BYTES_MAX // sequence_bytes)
        alike = list(same)
        runs += [alike[start : start + most] for start in range(0, len(alike), most)]
    return runs


def _build(
    batch: ForwardBatch, shape: AttentionShape, runs: Sequence[tuple[int, list[list[_Tile]]]]
) -> AttentionPlan:
    device = batch.token_ids.device
    groups: list[TileGroup] = []
    output_slots = [0] * batch.num_tokens
    num_slots = 0
    for queries, tile_runs in runs:
        query_rows: list[int] = []
        gathers: list[Gather] = []
        for run in tile_runs:
            start = len(query_rows) // queries
            for tile in run:
                row = tile.sequence.query_start - tile.sequence.first_position
                for position in range(tile.first, tile.stop):
                    slot = num_slots + len(query_rows) + position - tile.origin
                    output_slots[row + position] = slot
                query_rows += [row + position for position in _slot_positions(tile, queries)]
            gathers.append(_gather(run, start, queries, shape, device))
        if gathers:
            num_slots += len(query_rows)
            groups.append(
                TileGroup(
                    queries_per_tile=queries,
                    query_rows=torch.tensor(query_rows, device=device),
                    gathers=tuple(gathers),
                )
            )
    slots = torch.tensor(output_slots, dtype=torch.int64, device=device)
    return AttentionPlan(groups=tuple(groups), output_slots=slots)


def _slot_positions(tile: _Tile, queries: int) -> list[int]:
    """Position of the query in each slot; empty slots repeat the nearest one that is not."""
    slots = range(tile.origin, tile.origin + queries)
    return [min(max(position, tile.first), tile.stop - 1) for position in slots]


def _gather(
    run: list[_Tile], start: int, queries: int, shape: AttentionShape, device: torch.device
) -> Gather:
    """Plan the copy for one run: tiles of distinct sequences, or all tiles of one sequence."""
    sequences = list({id(tile.sequence): tile.sequence for tile in run}.values())
    assert len(sequences) in (1, len(run))
    num_pages = -(-run[-1].num_keys // shape.page_tokens)
    key_rows: list[int] = []
    stale: list[int] = []
    for sequence in sequences:
        # The copy is padded with the sequence's own first page: its values are those of tokens.
        used = -(-sequence.context_len // shape.page_tokens)
        table = sequence.block_table[: min(used, num_pages)]
        table += table[:1] * (num_pages - len(table))
        base = len(key_rows) * shape.page_tokens
        stale += [base + slot for slot in _stale_slots(sequence.context_len, num_pages, shape)]
        key_rows += [page * shape.num_layers * 2 for page in table]
    stale += [len(key_rows) * shape.page_tokens + slot for slot in stale]
    return Gather(
        rows=torch.tensor(key_rows + [row + 1 for row in key_rows], device=device),
        num_sequences=len(sequences),
        num_pages=num_pages,
        stale=torch.tensor(stale, device=device) if stale else None,
        calls=tuple(_calls(run, start, queries, shape, device)),
    )


def _stale_slots(context_len: int, num_pages: int, shape: AttentionShape) -> Iterator[int]:
    """Slots of one sequence's copy without a token: the tail of its last page, and its repeats."""
    last_page, used = divmod(context_len, shape.page_tokens)
    if used == 0:
        return
    # The padding repeats page 0, which has a tail of its own only if it is the last one.
    for page in range(num_pages) if last_page == 0 else (last_page,):
        if page < num_pages:
            yield from range(page * shape.page_tokens + used, (page + 1) * shape.page_tokens)


def _calls(
    run: list[_Tile], start: int, queries: int, shape: AttentionShape, device: torch.device
) -> Iterator[TileCall]:
    for num_keys, same in groupby(run, key=lambda tile: tile.num_keys):
        tiles = list(same)
        positions = torch.tensor([_slot_positions(tile, queries) for tile in tiles], device=device)
        yield TileCall(
            start=start,
            stop=start + len(tiles),
            num_keys=num_keys,
            mask=causal_mask(positions, num_keys, shape),
        )
        start += len(tiles)


def causal_mask(positions: torch.Tensor, num_keys: int, shape: AttentionShape) -> torch.Tensor:
    """Additive mask that hides the keys after each query: [tiles, 1, Q * G, num_keys].

    Args:
        positions: [tiles, Q] int64.
        num_keys: N.
        shape: Sizes and type.
    """
    hidden = torch.arange(num_keys, device=positions.device) > positions.unsqueeze(-1)
    mask = torch.zeros(hidden.shape, dtype=shape.dtype, device=positions.device)
    mask.masked_fill_(hidden, float("-inf"))
    return mask.repeat_interleave(shape.group_size, dim=1).unsqueeze(1)
