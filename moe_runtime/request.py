"""One request as its rank sees it: tokens, pages, and how far it is computed.

    token_ids  [ prompt ............... | output so far ....... ]
               0                        num_prompt              len
    computed   [ KV in pages ................. )
               0                               num_computed  <= len - 1 before a decode step

The last token has no KV yet: computing it yields the logits of the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_runtime.sampling import SamplingParams


@dataclass(slots=True, kw_only=True)
class Request:
    """State of one request on the rank that owns it; changed by the scheduler alone."""

    request_id: str
    token_ids: list[int]
    num_prompt: int
    sampling: SamplingParams
    #: chained keys of every full block of `token_ids`, extended as blocks fill
    block_keys: list[bytes] = field(default_factory=list)
    #: pages[i] holds tokens [i * page_tokens, (i + 1) * page_tokens)
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    #: tokens whose KV came from a prefix (here or in the pool) at the last admission
    num_cached: int = 0
    #: blocks [0, num_published) have been offered as a prefix
    num_published: int = 0
    #: order of arrival here; the latest is preempted first
    arrival: int = 0

    @property
    def num_output(self) -> int:
        """Tokens generated so far, on this rank and on those before it."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_remaining(self) -> int:
        """Tokens still to compute before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The part of one request that one pass computes: tokens [start, start + count)."""

    request: Request
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the end, so that its last row yields the next token."""
        return self.start + self.count == len(self.request.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPlan:
    """What one rank computes in one pass; no chunks means that it only serves its experts."""

    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        """Rows of the pass on this rank."""
        return sum(chunk.count for chunk in self.chunks)
