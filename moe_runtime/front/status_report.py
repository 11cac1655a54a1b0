"""The content of /status: what an operator wants to see first, as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic import Member, View
    from moe_runtime.front.relay import Relay
    from moe_runtime.front.router import WorkerState


def status_report(relay: Relay, view: View | None) -> dict[str, Any]:
    """Return view, members by rank, and counts of requests.

    Args:
        relay: Knows workers and requests.
        view: The current view, for what only it tells of its members.
    """
    router, journal = relay.router, relay.journal
    known = {member.incarnation: member for member in view.members} if view is not None else {}
    owned = journal.owned()
    members = [
        {
            "incarnation": name,
            **_identity(known.get(name), router.workers.get(name)),
            "open_requests": owned[name],
            **_load(router.workers.get(name)),
        }
        for name in router.members
    ]
    members.sort(key=lambda member: (member["rank"] is None, member["rank"], member["incarnation"]))
    return {
        "epoch": router.epoch,
        "members": members,
        "draining": relay.draining,
        "open_requests": len(journal),
        "queued_requests": len(journal.queued()),
        "journal": dict(journal.counts),
    }


def _identity(member: Member | None, worker: WorkerState | None) -> dict[str, Any]:
    """What the view says; of a member that the view does not describe, only what it said itself."""
    if member is None:
        rank = worker.hello.rank if worker is not None else None
        return {"rank": rank, "role": None, "node": None, "address": None, "pid": None}
    return {
        "rank": member.rank,
        "role": member.role.value,
        "node": member.node,
        "address": member.address,
        "pid": member.pid,
    }


def _load(worker: WorkerState | None) -> dict[str, Any]:
    load = worker.load if worker is not None else None
    return {
        "said_hello": worker is not None,
        "running": load.running if load else None,
        "waiting": load.waiting if load else None,
        "free_pages": load.free_pages if load else None,
        "num_pages": load.num_pages if load else None,
        "epoch": load.epoch if load else None,
        "counters": load.counters if load else {},
    }
