"""Which heads a rank of a tensor-parallel group holds.

8 heads, 4 ranks    rank r holds heads 2r, 2r + 1, and writes them
2 heads, 8 ranks    rank r holds head r // 4; ranks 0 and 4 write
latent, any ranks   every rank holds it; rank 0 writes
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import InvalidValue
from kvstore.pages.layout import PageLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShare:
    """One rank's part.

    Attributes:
        heads: The KV heads it holds, of the model's.
        groups: The same as head groups of the layout.
        writes: False if another rank of its tensor-parallel group holds the same and writes it.
    """

    heads: range
    groups: range
    writes: bool


def share_of(layout: PageLayout, *, rank: int, size: int) -> HeadShare:
    """Return what rank `rank` of `size` holds.

    Raises:
        InvalidValue: The heads cannot be split that way, or a head group would be split.
    """
    heads = layout.kv_heads
    if not 0 <= rank < size:
        raise InvalidValue(problem=f"rank {rank} of {size}")
    if heads % size == 0:
        count = heads // size
        first, writes = rank * count, True
    elif size % heads == 0 or heads == 1:
        copies = size // heads
        first, count, writes = rank // copies, 1, rank % copies == 0
    else:
        raise InvalidValue(problem=f"{heads} KV heads do not split over {size} ranks")
    per_group = layout.heads_per_group
    if first % per_group or count % per_group:
        raise InvalidValue(
            problem=f"a rank of {size} has {count} heads, but {per_group} make a head group: "
            f"a layout for such ranks needs {min(size, heads)} groups or more"
        )
    return HeadShare(
        heads=range(first, first + count),
        groups=range(first // per_group, (first + count) // per_group),
        writes=writes,
    )
