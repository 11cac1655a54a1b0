"""A client's or node's way to the store master: typed requests, deadlines, no repeated waiting."""

from __future__ import annotations

import logging
import threading
import time
from typing import Final, TypeVar

import msgspec

from kvstore.errors import Fenced, MasterRefused, MasterUnavailable
from kvstore.wire import messages as m
from transfer.control import RpcClient
from transfer.errors import RpcTimeout, TransferError

logger = logging.getLogger(__name__)

ReplyT = TypeVar("ReplyT", bound=m.Reply)
COOL_S_MAX: Final = 1.0


class MasterLink:
    """Requests to one master. Thread-safe.

    After a request ran into its deadline, further ones fail at once for a short while: a dead
    master costs every caller one wait, not one wait per request.

    Args:
        address: The master's address.
        secret: The cluster secret.
        identity: Name of this end, unique among all links to the master.
        timeout_s: Deadline of a request that names none.
    """

    def __init__(self, address: str, *, secret: bytes, identity: str, timeout_s: float) -> None:
        self._secret = secret
        self._identity = identity
        self._timeout_s = timeout_s
        self._address = address
        self._rpc = RpcClient(address, secret, identity=identity)
        self._lock = threading.Lock()
        self._silent_until = 0.0

    @property
    def address(self) -> str:
        """Where requests go."""
        return self._address

    def redirect(self, address: str) -> None:
        """Send later requests to another master; those under way end by themselves."""
        rpc = RpcClient(address, self._secret, identity=self._identity)
        with self._lock:
            previous, self._rpc, self._address = self._rpc, rpc, address
            self._silent_until = 0.0
        previous.close()

    def close(self) -> None:
        """Stop asking."""
        self._rpc.close()

    def ask(
        self, request: m.Request, expected: type[ReplyT], *, timeout_s: float | None = None
    ) -> ReplyT:
        """Send a request and return the reply.

        Raises:
            MasterUnavailable: No answer in time; the request may or may not have been handled.
            Fenced: The sender's incarnation is out of the cluster.
            MasterRefused: The request is not legal.
        """
        operation = type(request).__name__
        patience_s = self._timeout_s if timeout_s is None else timeout_s
        with self._lock:
            rpc, address = self._rpc, self._address
            if time.monotonic() < self._silent_until:
                raise MasterUnavailable(
                    operation=operation, address=address, problem="did not answer a moment ago"
                )
        try:
            reply = m.decode_reply(rpc.request(m.encode(request), timeout_s=patience_s))
        except RpcTimeout as error:
            self._found_silent(address, patience_s)
            raise MasterUnavailable(
                operation=operation, address=address, problem=str(error)
            ) from error
        except (TransferError, msgspec.MsgspecError) as error:
            raise MasterUnavailable(
                operation=operation, address=address, problem=f"{type(error).__name__}: {error}"
            ) from error
        if isinstance(reply, m.Refused):
            if reply.reason is m.RefusalReason.FENCED:
                raise Fenced(incarnation=self._identity)
            raise MasterRefused(
                operation=operation, problem=reply.problem, reason=str(reply.reason)
            )
        if not isinstance(reply, expected):
            raise MasterRefused(operation=operation, problem=f"answered {type(reply).__name__}")
        return reply

    def _found_silent(self, address: str, waited_s: float) -> None:
        with self._lock:
            if address == self._address:
                self._silent_until = time.monotonic() + min(COOL_S_MAX, waited_s)
