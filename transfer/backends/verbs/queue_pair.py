"""One end of a reliable connection between two devices."""

from __future__ import annotations

import secrets
from ipaddress import IPv6Address
from typing import Any, Final

from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr

from transfer.backends.verbs.binding import PyverbsError, PyverbsRDMAError, constant
from transfer.backends.verbs.completion import CompletionQueue
from transfer.backends.verbs.device import Device
from transfer.backends.verbs.messages import End

RELIABLE: Final = constant("QPT_RC")
ERROR_STATE: Final = constant("QPS_ERR")
STATE_ONLY: Final = constant("QP_STATE")
RESPONDER_RIGHTS: Final = constant("ACCESS_REMOTE_WRITE") | constant("ACCESS_REMOTE_READ")
READS_MAX: Final = 16
INLINE_BYTES: Final = 64
HOP_LIMIT: Final = 64
# 4.096 us times 2 to the 14th: 67 ms to an acknowledgement, as often as this; then the rail is
# broken. The sprayer has usually gone elsewhere long before.
TIMEOUT: Final = 14
RETRIES: Final = 4
# A receiver without a posted receive is asked again for ever (7), every 0.64 ms (12): only its
# death, or the deadline of the operation, ends that.
RECEIVER_NOT_READY_RETRIES: Final = 7
RECEIVER_NOT_READY_TIMER: Final = 12
SEQUENCE_NUMBERS: Final = 1 << 24


class QueuePair:
    """A queue pair in a protection domain. It owns no memory.

    Attributes:
        number: names it on its device.
        sequence: of its first packet.
        inline_bytes: what may travel inside of a request.
    """

    def __init__(
        self,
        device: Device,
        domain: Any,
        completions: CompletionQueue,
        *,
        send_requests: int,
        pieces: int,
        receives: Any = None,
    ) -> None:
        self._device = device
        self._serves = receives is not None
        self.sequence = secrets.randbelow(SEQUENCE_NUMBERS)
        self.inline_bytes = 0 if self._serves else INLINE_BYTES

        def make() -> QP:
            capacity = QPCap(
                max_send_wr=send_requests, max_send_sge=pieces, max_recv_wr=1, max_recv_sge=1,
                max_inline_data=self.inline_bytes,
            )  # fmt: skip
            queue = completions.queue
            attributes = QPInitAttr(
                qp_type=RELIABLE, scq=queue, rcq=queue, cap=capacity, srq=receives
            )
            return QP(domain, attributes)

        try:
            self._pair = make()
        except PyverbsRDMAError:
            if not self.inline_bytes:
                raise
            self.inline_bytes = 0  # some devices take none
            self._pair = make()
        self.number = int(self._pair.qp_num)
        self._is_open = True

    def connect(self, end: End, lane: int) -> None:
        """Bring it to where it can be used: for serving, or for sending too.

        The kernel resolves the other device's address in here, for which it waits up to a
        second if it is not known; see `reachability`.

        Raises:
            PyverbsError: it is destroyed, or does not reach the other end.
        """
        self._check()
        attributes = QPAttr(port_num=self._device.port)
        attributes.pkey_index = 0
        attributes.qp_access_flags = RESPONDER_RIGHTS if self._serves else 0
        self._pair.to_init(attributes)
        limits = self._device.limits
        attributes.path_mtu = min(end.mtu, limits.mtu)
        attributes.dest_qp_num = end.numbers[lane]
        attributes.rq_psn = end.sequence[lane]
        attributes.max_dest_rd_atomic = min(limits.reads, READS_MAX)
        attributes.min_rnr_timer = RECEIVER_NOT_READY_TIMER
        attributes.ah_attr = self._route(end)
        self._pair.to_rtr(attributes)
        if self._serves:
            return  # it only answers
        attributes.sq_psn = self.sequence
        attributes.timeout = TIMEOUT
        attributes.retry_cnt = RETRIES
        attributes.rnr_retry = RECEIVER_NOT_READY_RETRIES
        attributes.max_rd_atomic = max(min(limits.reads, end.reads, READS_MAX), 1)
        self._pair.to_rts(attributes)

    def _route(self, end: End) -> AHAttr:
        port = self._device.port
        if self._device.is_infiniband:
            return AHAttr(dlid=end.lid, port_num=port)
        route = GlobalRoute(
            dgid=GID(IPv6Address(end.gid).exploded),
            sgid_index=self._device.gid_idx,
            hop_limit=HOP_LIMIT,
        )
        return AHAttr(is_global=1, port_num=port, gr=route)

    def post(self, request: Any) -> None:
        """Post a chain of send requests.

        Raises:
            PyverbsRDMAError: it is destroyed, its queue is full, or it cannot send.
        """
        self._check()
        self._pair.post_send(request)

    def fail(self) -> None:
        """Let it end what it has under way, and serve no more. Idempotent."""
        if self._is_open:
            try:
                attributes = QPAttr(qp_state=ERROR_STATE)
                self._pair.modify(attributes, STATE_ONLY)
            except PyverbsError:
                self.close()  # its device is gone

    def _check(self) -> None:
        # pyverbs would follow a null pointer.
        if not self._is_open:
            raise PyverbsRDMAError("the queue pair is destroyed")

    def close(self) -> None:
        """Destroy it: no memory is touched through it any more. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._pair.close()


def make_end(device: Device, pairs: list[QueuePair]) -> End:
    """Describe our queue pairs on a device to the other side."""
    return End(
        gid=device.gid,
        lid=device.lid,
        mtu=device.limits.mtu,
        reads=min(device.limits.reads, READS_MAX),
        numbers=tuple(pair.number for pair in pairs),
        sequence=tuple(pair.sequence for pair in pairs),
    )
