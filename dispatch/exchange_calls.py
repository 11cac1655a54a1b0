"""The four halves of an exchange, for every dispatcher whose members send each other messages."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial

import torch

from dispatch.carrier import Carrier
from dispatch.dispatcher import Dispatcher
from dispatch.exchange import Exchange
from dispatch.handle import DispatchHandle, ExpertRows, Outgoing, Returning
from dispatch.pass_calls import PassCalls
from dispatch.passes import Call


class ExchangeCalls(PassCalls, Dispatcher):
    """A `Dispatcher` whose exchanges are messages that something carries. Not thread-safe."""

    @abstractmethod
    def _installed(self) -> tuple[Exchange, Carrier]:
        """Return what the messages of this epoch are, and what carries them."""

    def dispatch_send(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        layer: int,
        microbatch: int = 0,
        more: bool = False,
    ) -> Outgoing:
        """See `Dispatcher.dispatch_send`."""
        stamp = self._dispatching(layer, microbatch)
        exchange, carrier = self._installed()
        outgoing = exchange.send(x, topk_ids, topk_weights, stamp, more=more)
        with self._sequence:
            carrier.send(
                stamp,
                partial(exchange.dispatch_bytes, outgoing),
                partial(exchange.write_dispatch, outgoing),
            )
        self._sequence.expect(Call.DISPATCH_RECV, outgoing, stamp)
        return outgoing

    def dispatch_recv(
        self, outgoing: Outgoing, *, timeout_s: float | None = None
    ) -> tuple[ExpertRows, DispatchHandle]:
        """See `Dispatcher.dispatch_recv`."""
        stamp = outgoing.stamp
        self._sequence.check(Call.DISPATCH_RECV, outgoing, stamp)
        exchange, carrier = self._installed()
        with self._sequence:
            rows, handle = exchange.receive(
                outgoing, carrier.receive(stamp, outgoing.shared, timeout_s)
            )
        self._sequence.expect(Call.COMBINE_SEND, handle, stamp)
        return rows, handle

    def combine_send(self, expert_out: torch.Tensor, handle: DispatchHandle) -> Returning:
        """See `Dispatcher.combine_send`."""
        self._sequence.check(Call.COMBINE_SEND, handle, handle.stamp)
        stamp = handle.stamp.answer()
        exchange, carrier = self._installed()
        returning = exchange.returning(expert_out, handle, stamp)
        with self._sequence:
            carrier.send(
                stamp,
                partial(exchange.combine_bytes, returning),
                partial(exchange.write_combine, returning),
                due=partial(exchange.due_bytes, returning),
            )
        self._sequence.expect(Call.COMBINE_RECV, returning, stamp)
        return returning

    def combine_recv(self, returning: Returning, *, timeout_s: float | None = None) -> torch.Tensor:
        """See `Dispatcher.combine_recv`."""
        stamp = returning.handle.stamp.answer()
        self._sequence.check(Call.COMBINE_RECV, returning, stamp)
        exchange, carrier = self._installed()
        with self._sequence:
            out = exchange.finish(returning, carrier.receive(stamp, returning.shared, timeout_s))
        self._sequence.combined(stamp)
        return out
