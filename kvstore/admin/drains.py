"""How far a drain is, in words, and waiting for its end.

moving ──▶ empty          the node may go
│  ▲
│  └── a node comes, room is made, an administrator says that fewer copies will do
▼
stuck                     nothing moves until one of these happens; the drain goes on

waiting                   only what is being read or written is left: it goes when that ends
cancelled                 by an administrator, maybe another than who waits: what is left stays
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from kvstore.admin.reports import DrainReport, DrainState
from kvstore.errors import AdminRefused, DrainIncomplete, DrainStuck, MasterRefused
from kvstore.wire import messages as m

ASK_S: Final = 0.5  # from one question to the next
UNKNOWN: Final = 404


class Drainer(Protocol):
    """`StoreAdmin`, or `RemoteAdmin`."""

    def drain(
        self, node: str, *, cancel: bool = False, fewer_copies: bool = False, again: bool = False
    ) -> DrainReport:
        """Begin, go on with, or cancel a drain; return how far it is."""


def report_of(node: str, parts: Sequence[m.Draining]) -> DrainReport:
    """Add up what the masters say."""
    left = sum(part.left_blocks for part in parts)
    stuck = sum(part.stuck_blocks for part in parts)
    in_use = sum(part.in_use_blocks for part in parts)
    no_node = sum(part.no_node_blocks for part in parts)
    no_domain = sum(part.no_domain_blocks for part in parts)
    state = DrainState.MOVING
    if any(part.cancelled for part in parts):
        state = DrainState.CANCELLED
    elif not left:
        state = DrainState.EMPTY
    elif stuck and stuck + in_use >= left:
        state = DrainState.STUCK
    elif in_use >= left:
        state = DrainState.WAITING
    return DrainReport(
        node=node,
        state=state,
        left_blocks=left,
        left_bytes=sum(part.left_bytes for part in parts),
        moved_blocks=sum(part.moved_blocks for part in parts),
        stuck_blocks=stuck,
        no_node_blocks=no_node,
        no_domain_blocks=no_domain,
        no_space_blocks=max(0, stuck - no_node - no_domain),
        in_use_blocks=in_use,
        problem=_problem(no_node, no_domain, max(0, stuck - no_node - no_domain), in_use),
    )


def watch_drain(
    admin: Drainer,
    node: str,
    *,
    timeout_s: float,
    fewer_copies: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> DrainReport:
    """Drain a node; return when it is empty, stuck or cancelled, or at the deadline.

    Args:
        admin: Whom to ask.
        node: Its whole name.
        timeout_s: Longest wait; the drain itself goes on until it is cancelled.
        fewer_copies: One copy elsewhere is enough, however many were wanted.
        progress: Told of blocks moved, and of all there were.

    Raises:
        DrainIncomplete: The node left the pool before it was empty.
        KVStoreError: As `drain` of the administrator.
    """
    deadline_s = time.monotonic() + timeout_s
    report = admin.drain(node, fewer_copies=fewer_copies)
    while True:
        progress(report.moved_blocks, report.moved_blocks + report.left_blocks)
        left_s = deadline_s - time.monotonic()
        if is_over(report) or left_s <= 0:
            return report
        time.sleep(min(ASK_S, left_s))
        report = asked_again(admin, report, fewer_copies=fewer_copies)


def is_over(report: DrainReport) -> bool:
    """Tell whether there is nothing to wait for."""
    return report.state in (DrainState.EMPTY, DrainState.STUCK, DrainState.CANCELLED)


def asked_again(admin: Drainer, report: DrainReport, *, fewer_copies: bool = False) -> DrainReport:
    """Return how far the drain is by now. A new master, which knows of none, begins it anew.

    Raises:
        As `watch_drain`.
    """
    try:
        return admin.drain(report.node, fewer_copies=fewer_copies, again=True)
    except (AdminRefused, MasterRefused) as error:
        if not _is_gone(error):
            raise
        raise DrainIncomplete(
            node=report.node,
            left_blocks=report.left_blocks,
            problem="the node left the pool while it was drained",
        ) from error


def empty_node(
    admin: Drainer, node: str, *, timeout_s: float, fewer_copies: bool = False
) -> DrainReport:
    """Drain a node to its end. As `watch_drain`.

    Raises:
        DrainStuck: What is left has nowhere to go.
        DrainIncomplete: Something is left at the deadline, or it was cancelled (retryable).
    """
    report = watch_drain(admin, node, timeout_s=timeout_s, fewer_copies=fewer_copies)
    if report.state is DrainState.EMPTY:
        return report
    kind = DrainStuck if report.state is DrainState.STUCK else DrainIncomplete
    problem = report.problem or f"not at its end after {timeout_s:g} s"
    if report.state is DrainState.CANCELLED:
        problem = "it was cancelled"
    raise kind(node=node, left_blocks=report.left_blocks, problem=problem)


def _problem(no_node: int, no_domain: int, no_space: int, in_use: int) -> str | None:
    found = []
    if no_node:
        found.append(f"{no_node} blocks wait for another node: none takes blocks now")
    if no_domain:
        found.append(
            f"{no_domain} blocks wait for a node in another failure domain: each that takes blocks"
            " has a copy already, and their writers wanted as many as there are"
        )
    if no_space:
        found.append(f"{no_space} blocks wait for room on other nodes")
    if in_use:
        found.append(f"{in_use} blocks are being read or written")
    return "; ".join(found) or None


def _is_gone(error: AdminRefused | MasterRefused) -> bool:
    if isinstance(error, AdminRefused):
        return error.status == UNKNOWN
    return error.reason == m.RefusalReason.UNKNOWN_NODE
