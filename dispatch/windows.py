"""Where messages land and where they are assembled.

    my memory for peer p, one per epoch      | dispatch window | combine window |
    (offered to p alone, for writing)          parity 0          parity 1

    staging, one per dispatcher              | dispatch to p | combine to p | dispatch to q | ...

Windows are never reused for another epoch. A peer that was stopped in the middle of a copy and
wakes up in a later epoch goes on writing, and on this host nothing can stop it: the memory is
mapped in its address space. So what was offered to it is dropped here, and it writes into pages
that nobody else reads; they are freed when it ends.

Staging needs no such care: peers only ever read it through what this process sends.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from dispatch.errors import LayoutMismatch, StaleEpoch
from dispatch.layout import DTYPES, Bytes, DispatchLayout
from transfer import Access, RegionKey, allocate

if TYPE_CHECKING:
    from transfer import Memory, Region, TransferEngine

# epoch, hidden, topk, max tokens, dtype, combine dtype, bytes of the dispatch window; then the key
_OFFER = struct.Struct("<QIIIIIQ")
_NAMES = ("hidden", "topk", "max_tokens", "dtype", "combine_dtype")


def _facts(layout: DispatchLayout) -> tuple[int, ...]:
    return (
        layout.hidden,
        layout.topk,
        layout.max_tokens,
        DTYPES[layout.dtype],
        DTYPES[layout.combine_dtype],
    )


class ReceiveWindow:
    """This rank's two windows for one peer in one epoch. Owns the memory.

    Attributes:
        parts: By parity, the bytes of the dispatch and of the combine window.
    """

    def __init__(
        self, engine: TransferEngine, layout: DispatchLayout, *, peer: str, num_experts: int
    ) -> None:
        self._engine = engine
        self._split = layout.dispatch_window_bytes(num_experts)
        self._memory: Memory = allocate(self._split + layout.combine_window_bytes())
        self._region: Region = engine.register(self._memory)
        self._key: RegionKey = engine.offer(self._region, to=peer, access=Access.WRITE)
        whole: Bytes = self._memory.tensor.numpy()
        self.parts: tuple[Bytes, ...] = (whole[: self._split], whole[self._split :])

    def offer(self, layout: DispatchLayout, epoch: int) -> bytes:
        """Return what the peer needs for writing to the windows."""
        return _OFFER.pack(epoch, *_facts(layout), self._split) + self._key.encode()

    def drop(self) -> None:
        """Withdraw the key and let go of the memory; views of it must not be used any more."""
        self.parts = ()
        self._engine.release(self._region)
        self._memory.close()


class SendWindow:
    """A peer's two windows for this rank, as offered by the peer.

    Attributes:
        key: Of the peer's memory.
        offsets: By parity, where the window begins in it.
    """

    def __init__(self, key: RegionKey, split: int) -> None:
        self.key = key
        self.offsets = (0, split)

    @classmethod
    def read(cls, offer: bytes, layout: DispatchLayout, *, rank: int, epoch: int) -> SendWindow:
        """Read an offer.

        Raises:
            StaleEpoch: It is for another epoch.
            LayoutMismatch: The peer was configured with other sizes.
        """
        if len(offer) < _OFFER.size:
            raise LayoutMismatch(
                rank=rank, name="bytes", observed=len(offer), expected=f">= {_OFFER.size}"
            )
        offered_epoch, *facts, split = _OFFER.unpack_from(offer)
        if offered_epoch != epoch:
            raise StaleEpoch(
                what=f"offer of rank {rank}",
                observed=f"epoch {offered_epoch}",
                expected=f"epoch {epoch}",
            )
        for name, observed, expected in zip(_NAMES, facts, _facts(layout), strict=True):
            if observed != expected:
                raise LayoutMismatch(rank=rank, name=name, observed=observed, expected=expected)
        return cls(RegionKey.decode(offer[_OFFER.size :]), split)


class Staging:
    """Where messages are assembled: per peer one buffer for each parity.

    Grows with the number of peers and is kept over epochs. Owns the memory.

    Attributes:
        region: What `TransferEngine.write` takes as the source; None before the first `resize`.
        parts: Per peer position, by parity: the bytes.
        offsets: Per peer position, by parity: where they begin in the region.
    """

    def __init__(self, engine: TransferEngine, layout: DispatchLayout) -> None:
        self._engine = engine
        self._layout = layout
        self._memory: Memory | None = None
        self._num_peers = 0
        self.region: Region | None = None
        self.parts: list[tuple[Bytes, Bytes]] = []
        self.offsets: list[tuple[int, int]] = []

    def resize(self, num_peers: int) -> None:
        """Have room for messages to this many peers, whatever experts they hold."""
        if num_peers <= self._num_peers:
            return
        self.close()
        # The widest dispatch window there can be: a peer that holds all experts of a layer.
        split = self._layout.dispatch_window_bytes(self._layout.num_logical)
        stride = split + self._layout.combine_window_bytes()
        self._memory = allocate(num_peers * stride)
        self.region = self._engine.register(self._memory)
        whole: Bytes = self._memory.tensor.numpy()
        for begin in range(0, num_peers * stride, stride):
            self.offsets.append((begin, begin + split))
            self.parts.append((whole[begin : begin + split], whole[begin + split : begin + stride]))
        self._num_peers = num_peers

    def close(self) -> None:
        """Let go of the memory."""
        self.parts, self.offsets, self._num_peers = [], [], 0
        if self.region is not None and self._memory is not None:
            self._engine.release(self.region)
            self._memory.close()
        self.region = self._memory = None
