"""Dispatch of tensors on a device over the transfer engine.

    prepare         message buffers for an epoch, on the device; the old ones are dropped
    install         everybody's keys are in hand: passes may start
    dispatch_send   route and pack | wait for the device | write to each peer
    dispatch_recv   wait for each peer's message | arrange and unpack
    combine_send    pack results | wait for the device | write to each peer
    combine_recv    wait for each peer's message | weighted sums

`DeviceExchange` on the wires of `TransferDispatcher`: the same protocol, two windows per peer and
microbatch, the same refusals and deadlines. The windows are sized for the worst case, so none
grows. Rows stay on the device: where the engine can reach its memory they move from device to
device, and the host sees headers, sizes and immediates only.

The device is waited for before each write, since a peer's engine takes the bytes. That also is
what makes two windows enough: when this rank's next message is out, whatever it had queued on the
device before has been done, the reading of the last windows included.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from configs.schema import DispatchConfig
from dispatch.device_exchange import DeviceExchange, Received, Sent
from dispatch.errors import InputInvalid, LayoutMismatch
from dispatch.expert_map import ExpertMap
from dispatch.layout import DispatchLayout
from dispatch.message import Stamp
from dispatch.pass_calls import ChangingGroup, offer_of
from dispatch.passes import Call
from dispatch.waiting import PEER_ERRORS, Waiting
from dispatch.windows import offer_head, read_offer_head
from transfer import Access, RegionKey

if TYPE_CHECKING:
    from transfer import Region, TransferEngine

_LENGTH = struct.Struct("<H")


class _Peer(NamedTuple):
    position: int
    rank: int
    name: str


class DeviceDispatcher(ChangingGroup):
    """A dispatcher for one rank whose tensors are on a device. Not thread-safe.

    Its statistics do not say which experts were chosen.

    Args:
        engine: Open, connected to the members. Not owned.
        config: `pass_timeout_s`.
        layout: The same on every rank; `combine` must be exact.
        device: Where the tensors are.
        results_dtype: What experts return, the same on every rank; default: the layout's type.
        alignment: Of the first row of each expert.
    """

    def __init__(
        self,
        engine: TransferEngine,
        config: DispatchConfig,
        *,
        layout: DispatchLayout,
        device: torch.device,
        results_dtype: torch.dtype | None = None,
        alignment: int = 128,
    ) -> None:
        super().__init__(layout)
        self._engine = engine
        self._timeout_s = config.pass_timeout_s
        self._device = device
        self._results_dtype = results_dtype or layout.dtype
        self._wire_dtype = layout.returned_dtype(self._results_dtype)
        self._alignment = alignment
        self._exchanges: list[DeviceExchange] = []  # by microbatch
        self._outgoing: list[Region] = []  # by number of the window
        self._incoming: list[Region] = []
        self._peers: list[_Peer] = []
        self._keys: dict[int, list[RegionKey]] = {}  # rank -> by number of the window
        self._waiting: Waiting | None = None

    def prepare(
        self, *, epoch: int, rank: int, members: Mapping[int, str], expert_map: ExpertMap
    ) -> dict[int, bytes]:
        """Leave the old epoch and make the buffers of the new one.

        Args:
            epoch: The new epoch, greater than the last.
            rank: This rank.
            members: Rank -> peer name of all members, this one included.
            expert_map: Where the experts live in the new epoch.

        Returns:
            Other rank -> an offer that the caller has to deliver to that rank's `install`.

        Raises:
            InputInvalid: The epoch is not newer, or the layout or `rank` is not served. The
                dispatcher is as before.
        """
        self._check_newer(epoch)
        exchanges = [
            DeviceExchange(
                self._layout,
                expert_map,
                tuple(members),
                rank,
                device=self._device,
                alignment=self._alignment,
            )
            for _ in range(self._layout.microbatches)
        ]
        self._sequence.become_prepared(epoch)
        self._drop()
        self._exchanges = exchanges
        for exchange in exchanges:
            for parity in (0, 1):
                self._outgoing.append(self._engine.register(exchange.outgoing(parity)))
                self._incoming.append(self._engine.register(exchange.incoming(parity)))
        ranks, me = exchanges[0].members, exchanges[0].me
        # Everybody starts with the next rank, so that no rank is everybody's first.
        order = [(me + step) % len(ranks) for step in range(1, len(ranks))]
        self._peers = [_Peer(w, ranks[w], members[ranks[w]]) for w in order]
        return {peer.rank: self._offer(peer) for peer in self._peers}

    def _offer(self, peer: _Peer) -> bytes:
        parts = [offer_head(self._layout, self.epoch)]
        for window, region in enumerate(self._incoming):
            exchange = self._exchanges[window >> 1]
            if window & 1:
                offset, nbytes = exchange.result_window(peer.position, self._wire_dtype)
            else:
                nbytes = exchange.incoming(0).shape[1]
                offset = peer.position * nbytes
            key = self._engine.offer(
                region, to=peer.name, access=Access.WRITE, offset=offset, nbytes=nbytes
            ).encode()
            parts += [_LENGTH.pack(len(key)), key]
        return b"".join(parts)

    def install(self, offers: Mapping[int, bytes]) -> None:
        """Start the prepared epoch: all other members' keys are in hand.

        Args:
            offers: Other rank -> what its `prepare` returned for this rank.

        Raises:
            CallOrder: Nothing is prepared.
            StaleEpoch: An offer is for another epoch.
            LayoutMismatch: An offer is missing, or a member was configured with other sizes.
        """
        self._sequence.check_prepared()
        keys: dict[int, list[RegionKey]] = {}
        for peer in self._peers:
            offer = offer_of(offers, peer.rank)
            rest = read_offer_head(offer, self._layout, rank=peer.rank, epoch=self.epoch)
            keys[peer.rank] = _keys_of(rest, len(self._incoming), peer.rank)
        self._keys = keys
        self._waiting = Waiting(
            self._engine,
            epoch=self.epoch,
            timeout_s=self._timeout_s,
            peers={peer.rank: peer.name for peer in self._peers},
            num_windows=len(self._incoming),
        )
        self._sequence.become_idle()

    def dispatch_send(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        layer: int,
        microbatch: int = 0,
    ) -> Sent:
        """Send each token's row to the ranks of its experts.

        Args:
            x: [T, H] of the layout's type, on the device, contiguous, T <= `max_tokens`.
            topk_ids: [T, K] int64 or int32, contiguous; -1 masks a choice.
            topk_weights: [T, K] fp32, contiguous; unchanged until the combine.
            layer: Counted over the layers with experts.
            microbatch: Below `layout.microbatches`; must not have another exchange in flight.

        Returns:
            What the other calls of this exchange have to be given.

        Raises:
            InputInvalid, CapacityExceeded, CallOrder: Nothing was sent, the state is as before.
            PassFailed: A member was lost.
        """
        stamp = self._dispatching(layer, microbatch)
        exchange = self._exchanges[microbatch]
        self._settle(stamp)
        sent = exchange.send(x, topk_ids, topk_weights, stamp)
        with self._sequence:
            self._write(stamp, sent.num_bytes.tolist())
        self._counters.exchanges += 1
        self._counters.tokens += len(x)
        self._sequence.expect(Call.DISPATCH_RECV, sent, stamp)
        return sent

    def dispatch_recv(self, sent: Sent, *, timeout_s: float | None = None) -> Received:
        """Receive the rows for own experts; waits for the device.

        Args:
            sent: Of the `dispatch_send`.
            timeout_s: Longest time to wait in all; default: as long as messages keep arriving.

        Raises:
            StaleEpoch: `sent` is not due. The state is as before.
            MessageMismatch: Another rank runs something else.
            PassFailed: A member was lost or stayed silent; names it.
        """
        self._sequence.check(Call.DISPATCH_RECV, sent, sent.stamp)
        exchange = self._exchanges[sent.stamp.microbatch]
        with self._sequence:
            self._arrive(sent.stamp, timeout_s)
            received = exchange.receive(sent)
            exchange.check(received.arranged.faults)
        self._sequence.expect(Call.COMBINE_SEND, received, sent.stamp)
        return received

    def combine_send(self, results: torch.Tensor, received: Received, sent: Sent) -> None:
        """Send the experts' results back to the tokens' ranks.

        Args:
            results: [R, H] of the type that was agreed on, contiguous: row i belongs to row i of
                `received`.
            received: Of the `dispatch_recv`.
            sent: Of the `dispatch_send`.

        Raises:
            InputInvalid, StaleEpoch: Nothing was sent, and the state is as before.
            PassFailed: A member was lost.
        """
        self._sequence.check(Call.COMBINE_SEND, received, sent.stamp)
        if results.dtype is not self._results_dtype:
            raise InputInvalid(
                name="dtype of results",
                observed=str(results.dtype),
                expected=str(self._results_dtype),
            )
        stamp = sent.stamp.answer()
        self._settle(stamp)
        _, num_bytes = self._exchanges[stamp.microbatch].send_results(results, received, sent)
        with self._sequence:
            self._write(stamp, num_bytes.tolist())
        self._sequence.expect(Call.COMBINE_RECV, sent, sent.stamp)

    def combine_recv(self, sent: Sent, *, timeout_s: float | None = None) -> torch.Tensor:
        """Return every token's weighted sum over its experts' results: [T, H].

        Args:
            sent: Of the `dispatch_send`.
            timeout_s: As of `dispatch_recv`.

        Raises:
            StaleEpoch, MessageMismatch, PassFailed: As of `dispatch_recv`.
        """
        self._sequence.check(Call.COMBINE_RECV, sent, sent.stamp)
        exchange = self._exchanges[sent.stamp.microbatch]
        with self._sequence:
            self._arrive(sent.stamp.answer(), timeout_s)
            out, faults = exchange.finish(sent, self._wire_dtype)
            exchange.check(faults)
        self._sequence.combined(sent.stamp)
        return out

    def close(self) -> None:
        """Withdraw everything that was offered and let go of the memory. Idempotent."""
        self._sequence.become_failed()
        self._drop()

    def _first_messages(self) -> list[tuple[str, int]]:
        assert self._waiting is not None
        return self._waiting.first_messages()

    def _settle(self, stamp: Stamp) -> None:
        # The buffer is about to be packed again: the engine must have taken the last message.
        assert self._waiting is not None
        with self._sequence:
            self._waiting.settle(stamp)

    def _write(self, stamp: Stamp, sizes: list[int]) -> None:
        """Write the messages that the device has finished; asking for `sizes` waited for it."""
        waiting, window = self._waiting, stamp.window
        assert waiting is not None
        stride = self._exchanges[stamp.microbatch].outgoing(stamp.parity).shape[1]
        for peer in self._peers:
            try:
                transfer = self._engine.write(
                    peer.name,
                    self._outgoing[window],
                    self._keys[peer.rank][window],
                    peer.position * stride,
                    0,
                    sizes[peer.position],
                    immediate=waiting.immediates[window],
                    timeout_s=self._timeout_s,
                )
            except PEER_ERRORS as error:
                raise waiting.failed(stamp, error, peer.rank) from error
            waiting.transfers[window].append((peer.rank, transfer))
            self._counters.sent_bytes += sizes[peer.position]

    def _arrive(self, stamp: Stamp, timeout_s: float | None) -> None:
        assert self._waiting is not None
        if not self._peers:
            return
        start = time.monotonic()
        self._waiting.arrive(stamp, timeout_s)
        self._counters.waited_s += time.monotonic() - start

    def _drop(self) -> None:
        for region in (*self._outgoing, *self._incoming):
            self._engine.release(region)
        self._outgoing, self._incoming = [], []
        self._exchanges, self._peers, self._keys = [], [], {}
        self._waiting = None


def _keys_of(offer: bytes, count: int, rank: int) -> list[RegionKey]:
    keys: list[RegionKey] = []
    begin = 0
    for _ in range(count):
        begin += _LENGTH.size
        if begin > len(offer) or begin + (nbytes := _length_before(offer, begin)) > len(offer):
            raise LayoutMismatch(
                rank=rank, name="bytes of keys", observed=len(offer), expected=f"{count} keys"
            )
        keys.append(RegionKey.decode(offer[begin : begin + nbytes]))
        begin += nbytes
    return keys


def _length_before(offer: bytes, begin: int) -> int:
    return int(_LENGTH.unpack_from(offer, begin - _LENGTH.size)[0])
