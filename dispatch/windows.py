"""Where messages land and where they are assembled.

    my memory for peer p, one per epoch      | dispatch 0 | combine 0 | dispatch 1 | ...
    (offered to p alone, for writing)          number = microbatch << 1 | parity

    staging, one per dispatcher              the same for each peer, side by side

Windows are never reused for another epoch. A peer that was stopped in the middle of a copy and
wakes up in a later epoch goes on writing, and on this host nothing can stop it: the memory is
mapped in its address space. So what was offered to it is dropped here, and it writes into pages
that nobody else reads; they are freed when it ends.

Staging needs no such care: peers only ever read it through what this process sends.
"""

from __future__ import annotations

import struct
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from dispatch.errors import LayoutMismatch, StaleEpoch
from dispatch.layout import DTYPES, Bytes, DispatchLayout
from transfer import Access, RegionKey, allocate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transfer import Memory, Region, TransferEngine

# epoch, hidden, topk, max tokens, dtype, combine dtype, microbatches; then the bytes of each
# window, then the key
_OFFER = struct.Struct("<QIIIIII")
_SIZE_BYTES = 8
_NAMES = ("hidden", "topk", "max_tokens", "dtype", "combine_dtype", "microbatches")


def _facts(layout: DispatchLayout) -> tuple[int, ...]:
    return (
        layout.hidden,
        layout.topk,
        layout.max_tokens,
        DTYPES[layout.dtype],
        DTYPES[layout.combine_dtype],
        layout.microbatches,
    )


def window_sizes(layout: DispatchLayout, num_experts: int) -> list[int]:
    """Return the bytes of each window of a peer, by number."""
    pair = [layout.dispatch_window_bytes(num_experts), layout.combine_window_bytes()]
    return pair * layout.microbatches


def _cut(whole: Bytes, begin: int, sizes: Sequence[int]) -> list[Bytes]:
    ends = list(accumulate(sizes, initial=begin))
    return [whole[start:end] for start, end in pairwise(ends)]


class ReceiveWindow:
    """This rank's windows for one peer in one epoch. Owns the memory.

    Attributes:
        parts: By number, the bytes of each window.
    """

    def __init__(
        self, engine: TransferEngine, layout: DispatchLayout, *, peer: str, num_experts: int
    ) -> None:
        self._engine = engine
        self._sizes = window_sizes(layout, num_experts)
        self._memory: Memory = allocate(sum(self._sizes))
        self._region: Region = engine.register(self._memory)
        self._key: RegionKey = engine.offer(self._region, to=peer, access=Access.WRITE)
        self.parts = _cut(self._memory.tensor.numpy(), 0, self._sizes)

    def offer(self, layout: DispatchLayout, epoch: int) -> bytes:
        """Return what the peer needs for writing to the windows."""
        sizes = struct.pack(f"<{len(self._sizes)}Q", *self._sizes)
        return _OFFER.pack(epoch, *_facts(layout)) + sizes + self._key.encode()

    def drop(self) -> None:
        """Withdraw the key and let go of the memory; views of it must not be used any more."""
        self.parts = []
        self._engine.release(self._region)
        self._memory.close()


class SendWindow:
    """A peer's windows for this rank, as offered by the peer.

    Attributes:
        key: Of the peer's memory.
        offsets: By number, where the window begins in it.
    """

    def __init__(self, key: RegionKey, sizes: Sequence[int]) -> None:
        self.key = key
        self.offsets = [0, *accumulate(sizes)][:-1]

    @classmethod
    def read(cls, offer: bytes, layout: DispatchLayout, *, rank: int, epoch: int) -> SendWindow:
        """Read an offer.

        Raises:
            StaleEpoch: It is for another epoch.
            LayoutMismatch: The peer was configured with other sizes.
        """
        num_windows = 2 * layout.microbatches
        keys_at = _OFFER.size + num_windows * _SIZE_BYTES
        if len(offer) < keys_at:
            raise LayoutMismatch(
                rank=rank, name="bytes", observed=len(offer), expected=f">= {keys_at}"
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
        sizes = struct.unpack_from(f"<{num_windows}Q", offer, _OFFER.size)
        return cls(RegionKey.decode(offer[keys_at:]), sizes)


class Staging:
    """Where messages are assembled: for each peer one buffer per window.

    Grows with the number of peers and is kept over epochs. Owns the memory.

    Attributes:
        region: What `TransferEngine.write` takes as the source; None before the first `resize`.
        parts: Per peer position, by number of the window: the bytes.
        offsets: Per peer position, by number: where they begin in the region.
    """

    def __init__(self, engine: TransferEngine, layout: DispatchLayout) -> None:
        self._engine = engine
        self._layout = layout
        self._memory: Memory | None = None
        self._num_peers = 0
        self.region: Region | None = None
        self.parts: list[list[Bytes]] = []
        self.offsets: list[list[int]] = []

    def resize(self, num_peers: int) -> None:
        """Have room for messages to this many peers, whatever experts they hold."""
        if num_peers <= self._num_peers:
            return
        self.close()
        # The widest dispatch window there can be: a peer that holds all experts of a layer.
        sizes = window_sizes(self._layout, self._layout.num_logical)
        stride = sum(sizes)
        self._memory = allocate(num_peers * stride)
        self.region = self._engine.register(self._memory)
        whole: Bytes = self._memory.tensor.numpy()
        for begin in range(0, num_peers * stride, stride):
            self.offsets.append([begin, *accumulate(sizes, initial=begin)][1:-1])
            self.parts.append(_cut(whole, begin, sizes))
        self._num_peers = num_peers

    def close(self) -> None:
        """Let go of the memory."""
        self.parts, self.offsets, self._num_peers = [], [], 0
        if self.region is not None and self._memory is not None:
            self._engine.release(self.region)
            self._memory.close()
        self.region = self._memory = None
