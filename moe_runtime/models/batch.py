"""What one forward step computes: a flat run of tokens, and the sequences they belong to.

Legend: T tokens of this step (all sequences one after another), S rows whose logits are wanted.

    token_ids      [ a0 a1 a2 | b9 | c4 c5 ]      three sequences: a prefill, a decode, a chunk
    query_start      0          3    4
    num_queries      3          1    2
    context_len      3          10   6            tokens in the KV cache once the step is done
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSlice:
    """One sequence's part of a step: rows `[query_start, query_start + num_queries)` of the batch.

    The queries are the *last* tokens of the context: the query in row `query_start + i` stands at
    position `context_len - num_queries + i` and attends to positions `[0, that position]`.

    Attributes:
        query_start: First row of the batch.
        num_queries: Rows, >= 1.
        context_len: Tokens of the sequence in the cache after this step, the queries included.
        block_table: Page of each run of `page_tokens` positions; it may be longer than needed.
    """

    query_start: int
    num_queries: int
    context_len: int
    block_table: tuple[int, ...]

    @property
    def first_position(self) -> int:
        """Position of the first query."""
        return self.context_len - self.num_queries


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """Input of one forward step. T = 0 is legal: the rank takes part with no tokens.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, position of each token in its sequence.
        slot_mapping: [T] int64, where the token's key and value go: `page * page_tokens + offset`.
        sequences: Cover the rows `[0, T)` in order, without gaps.
        logit_rows: [S] int64, rows whose logits are wanted.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    sequences: tuple[SequenceSlice, ...]
    logit_rows: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.token_ids.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceInput:
    """New tokens of one sequence, from which `build_batch` makes its part of a batch.

    Attributes:
        token_ids: The tokens to compute, one or more.
        first_position: Position of the first of them; everything before it is in the cache.
        block_table: Pages that cover `[0, first_position + len(token_ids))`.
        logits: How many of the last tokens' logits are wanted.
    """

    token_ids: Sequence[int]
    first_position: int
    block_table: tuple[int, ...]
    logits: int = 1


def build_batch(sequences: Sequence[SequenceInput], *, page_tokens: int) -> ForwardBatch:
    """Lay sequences one after another and compute rows, positions and cache slots.

    Args:
        sequences: May be empty (T = 0).
        page_tokens: Tokens per KV page.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    slices: list[SequenceSlice] = []
    logit_rows: list[int] = []
    for sequence in sequences:
        start, count = len(token_ids), len(sequence.token_ids)
        end_position = sequence.first_position + count
        assert 0 <= sequence.logits <= count
        assert count >= 1
        assert end_position <= len(sequence.block_table) * page_tokens, "block table too short"
        token_ids.extend(sequence.token_ids)
        for position in range(sequence.first_position, end_position):
            page, offset = divmod(position, page_tokens)
            positions.append(position)
            slots.append(sequence.block_table[page] * page_tokens + offset)
        slices.append(
            SequenceSlice(
                query_start=start,
                num_queries=count,
                context_len=end_position,
                block_table=sequence.block_table,
            )
        )
        logit_rows.extend(range(start + count - sequence.logits, start + count))
    return ForwardBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        sequences=tuple(slices),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
    )
