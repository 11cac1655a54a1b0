"""Where messages land and where they are assembled.

    my memory for peer p, one per epoch      | dispatch 0 | combine 0 | dispatch 1 | ...
    (offered to p alone, for writing)          number = microbatch << 1 | parity

    staging, one per dispatcher              the same for each peer, side by side

A window that had to grow (`dispatch.growth`) moves to memory of its own, on either side.

Windows are never reused for another epoch. A peer that was stopped in the middle of a copy and
wakes up in a later epoch goes on writing, and on this host nothing can stop it: the memory is
mapped in its address space. So what was offered to it is dropped here, and it writes into pages
that nobody else reads; they are freed when it ends.

Staging needs no such care: peers only ever read it through what this process sends.
"""

from __future__ import annotations

import math
import struct
from itertools import accumulate, pairwise
from operator import gt
from typing import TYPE_CHECKING, NamedTuple

from configs.dispatch_options import CombineWire
from dispatch.errors import LayoutMismatch, StaleEpoch
from dispatch.growth import NOTE_BYTES_MAX, grown_bytes, with_grant
from dispatch.layout import DTYPES, Bytes, DispatchLayout
from transfer import Access, RegionKey, allocate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transfer import Memory, Region, TransferEngine

# epoch, then the numbers of `_NAMES`; then the bytes of each window, then the key
_OFFER = struct.Struct("<Q9I")
_SIZE_BYTES = 8
_NAMES = (
    "hidden",
    "topk",
    "max_tokens",
    "dtype",
    "combine_dtype",
    "microbatches",
    "combine",
    "dispatch_wire",
    "combine_wire",
)


def _facts(layout: DispatchLayout) -> tuple[int, ...]:
    return (
        layout.hidden,
        layout.topk,
        layout.max_tokens,
        DTYPES[layout.dtype],
        DTYPES[layout.combine_dtype],
        layout.microbatches,
        layout.reduced,
        layout.fp8,
        layout.combine_wire is CombineWire.BF16,
    )


def offer_head(layout: DispatchLayout, epoch: int) -> bytes:
    """Return how an offer begins: for which epoch and which messages it is."""
    return _OFFER.pack(epoch, *_facts(layout))


def read_offer_head(offer: bytes, layout: DispatchLayout, *, rank: int, epoch: int) -> bytes:
    """Return what follows the head of an offer.

    Raises:
        StaleEpoch: It is for another epoch.
        LayoutMismatch: The peer was configured with other sizes.
    """
    if len(offer) < _OFFER.size:
        raise LayoutMismatch(
            rank=rank, name="bytes", observed=len(offer), expected=f">= {_OFFER.size}"
        )
    offered_epoch, *facts = _OFFER.unpack_from(offer)
    if offered_epoch != epoch:
        raise StaleEpoch(
            what=f"offer of rank {rank}",
            observed=f"epoch {offered_epoch}",
            expected=f"epoch {epoch}",
        )
    for name, observed, expected in zip(_NAMES, facts, _facts(layout), strict=True):
        if observed != expected:
            raise LayoutMismatch(rank=rank, name=name, observed=observed, expected=expected)
    return offer[_OFFER.size :]


def window_sizes(
    layout: DispatchLayout, num_experts: int, num_choices: int | None = None
) -> list[int]:
    """Return the bytes of each window of a peer, by number.

    Args:
        layout: Of the messages.
        num_experts: Most experts of the receiving rank in a layer.
        num_choices: Most choices in a message; default: all that a rank may have.
    """
    most = layout.choices_max
    num_choices = most if num_choices is None else min(num_choices, most)
    pair = [
        max(layout.dispatch_window_bytes(num_experts, num_choices), NOTE_BYTES_MAX),
        max(layout.combine_window_bytes(num_choices), NOTE_BYTES_MAX),
    ]
    return pair * layout.microbatches


def largest_messages(layout: DispatchLayout, num_experts: int) -> list[int]:
    """Return the most bytes that a message may have, by number of its window."""
    return [with_grant(size) for size in window_sizes(layout, num_experts)]


def expected_choices(
    layout: DispatchLayout, num_ranks: int, *, tokens: int | None, slack: float
) -> int:
    """Return the choices that a window is sized for: `slack` times a rank's even share.

    Args:
        layout: K, and the most tokens of a rank.
        num_ranks: Ranks that share the choices.
        tokens: Tokens of a rank in a usual pass; default: the most there may be.
        slack: How uneven routing may be before a window has to grow.
    """
    share = min(tokens or layout.max_tokens, layout.max_tokens) * layout.topk / num_ranks
    return min(math.ceil(slack * share), layout.choices_max)


def _cut(whole: Bytes, begin: int, sizes: Sequence[int]) -> list[Bytes]:
    ends = list(accumulate(sizes, initial=begin))
    return [whole[start:end] for start, end in pairwise(ends)]


class OwnMemory:
    """Memory of one grown window, registered. Owns it."""

    def __init__(self, engine: TransferEngine, nbytes: int) -> None:
        self._engine = engine
        self._memory: Memory = allocate(nbytes)
        self.region: Region = engine.register(self._memory)
        self.part: Bytes = self._memory.tensor.numpy()
        self._key: RegionKey | None = None

    def key(self, peer: str, access: Access) -> RegionKey:
        """Return what lets a peer in; always the same peer and access."""
        if self._key is None:
            self._key = self._engine.offer(self.region, to=peer, access=access)
        return self._key

    def close(self) -> None:
        """Withdraw the key and let go of the memory."""
        self._engine.release(self.region)
        self._memory.close()


class ReceiveWindow:
    """This rank's windows for one peer in one epoch. Owns the memory.

    Attributes:
        parts: By number, the bytes of each window.
        largest: By number, the most bytes that a message may have.
    """

    def __init__(
        self,
        engine: TransferEngine,
        layout: DispatchLayout,
        *,
        peer: str,
        num_experts: int,
        num_choices: int | None = None,
    ) -> None:
        self._engine = engine
        self._peer = peer
        self._sizes = window_sizes(layout, num_experts, num_choices)
        self.largest = largest_messages(layout, num_experts)
        self._memory: Memory = allocate(sum(self._sizes))
        self._region: Region = engine.register(self._memory)
        self._key: RegionKey = engine.offer(self._region, to=peer, access=Access.WRITE)
        self._grown: dict[int, OwnMemory] = {}
        self.parts = _cut(self._memory.tensor.numpy(), 0, self._sizes)

    def offer(self, layout: DispatchLayout, epoch: int) -> bytes:
        """Return what the peer needs for writing to the windows."""
        sizes = struct.pack(f"<{len(self._sizes)}Q", *self._sizes)
        return offer_head(layout, epoch) + sizes + self._key.encode()

    def grow(self, window: int, nbytes: int) -> Region:
        """Make room for a message; return the region to read it into. The old bytes are gone."""
        if window in self._grown:
            self._grown.pop(window).close()
        grown = OwnMemory(self._engine, grown_bytes(nbytes, self.largest[window]))
        self._grown[window] = grown
        self.parts[window] = grown.part
        return grown.region

    def grant(self, window: int) -> RegionKey:
        """Return the key of a window that has grown."""
        return self._grown[window].key(self._peer, Access.WRITE)

    def drop(self) -> None:
        """Withdraw the keys and let go of the memory; views of it must not be used any more."""
        self.parts = []
        for grown in self._grown.values():
            grown.close()
        self._grown = {}
        self._engine.release(self._region)
        self._memory.close()


class SendWindow:
    """A peer's windows for this rank, as offered by the peer.

    Attributes:
        keys: By number, of the peer's memory.
        offsets: By number, where the window begins in it.
        sizes: By number, its bytes.
    """

    def __init__(self, key: RegionKey, sizes: Sequence[int]) -> None:
        self.keys = [key] * len(sizes)
        self.offsets = [0, *accumulate(sizes)][:-1]
        self.sizes = list(sizes)

    def accept(self, window: int, key: RegionKey) -> None:
        """Use the memory that the peer has granted instead of what it offered before."""
        self.keys[window], self.offsets[window], self.sizes[window] = key, 0, key.nbytes

    @classmethod
    def read(cls, offer: bytes, layout: DispatchLayout, *, rank: int, epoch: int) -> SendWindow:
        """Read an offer.

        Raises:
            StaleEpoch: It is for another epoch.
            LayoutMismatch: The peer was configured with other sizes.
        """
        num_windows = 2 * layout.microbatches
        rest = read_offer_head(offer, layout, rank=rank, epoch=epoch)
        keys_at = num_windows * _SIZE_BYTES
        if len(rest) < keys_at:
            raise LayoutMismatch(
                rank=rank, name="bytes", observed=len(rest), expected=f">= {keys_at}"
            )
        return cls(RegionKey.decode(rest[keys_at:]), struct.unpack_from(f"<{num_windows}Q", rest))


class StagedPart(NamedTuple):
    """Where a message is assembled: bytes, and where the engine finds them."""

    region: Region
    offset: int
    part: Bytes


class Staging:
    """Where messages are assembled: for each peer one part per window.

    Kept over epochs as long as it is large enough. Owns the memory.

    Attributes:
        parts: Per peer position, by number of the window.
    """

    def __init__(self, engine: TransferEngine, layout: DispatchLayout) -> None:
        self._engine = engine
        self._largest = largest_messages(layout, layout.num_logical)
        self._memory: Memory | None = None
        self._region: Region | None = None
        self._num_peers = 0
        self._sizes: list[int] = []
        self._grown: dict[tuple[int, int], OwnMemory] = {}
        self.parts: list[list[StagedPart]] = []

    def resize(self, num_peers: int, sizes: Sequence[int]) -> None:
        """Have room for messages of these sizes to this many peers; forget what has grown."""
        self._shrink()
        if num_peers <= self._num_peers and not any(map(gt, sizes, self._sizes)):
            return
        self.close()
        self._sizes = list(sizes)
        stride = sum(sizes)
        self._memory = allocate(num_peers * stride)
        self._region = region = self._engine.register(self._memory)
        whole: Bytes = self._memory.tensor.numpy()
        for begin in range(0, num_peers * stride, stride):
            offsets = list(accumulate(sizes, initial=begin))
            self.parts.append(
                [StagedPart(region, start, whole[start:end]) for start, end in pairwise(offsets)]
            )
        self._num_peers = num_peers

    def own(self, i: int, window: int, nbytes: int) -> OwnMemory:
        """Return memory of its own for a message that exceeds the part, or the peer's window."""
        grown = self._grown.get((i, window))
        if grown is None or nbytes > len(grown.part):
            if grown is not None:
                grown.close()
            grown = OwnMemory(self._engine, grown_bytes(nbytes, self._largest[window]))
            self._grown[i, window] = grown
        return grown

    def close(self) -> None:
        """Let go of the memory."""
        self._shrink()
        self.parts, self._num_peers, self._sizes = [], 0, []
        if self._region is not None and self._memory is not None:
            self._engine.release(self._region)
            self._memory.close()
        self._region = self._memory = None

    def _shrink(self) -> None:
        for grown in self._grown.values():
            grown.close()
        self._grown = {}
