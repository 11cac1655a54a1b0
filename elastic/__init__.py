"""Membership: who takes part, which view is current, where experts live, and the way to the next.

Several names import torch; they are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transfer.lazy_names import lazy_names

if TYPE_CHECKING:
    from elastic.agent import LocalAgent as LocalAgent
    from elastic.agent import WorkerGroup as WorkerGroup
    from elastic.coordinator import Coordinator as Coordinator
    from elastic.effects import GroupMember as GroupMember
    from elastic.errors import ElasticError as ElasticError
    from elastic.errors import Evicted as Evicted
    from elastic.errors import ExpertsUnavailable as ExpertsUnavailable
    from elastic.errors import JoinTimeout as JoinTimeout
    from elastic.errors import NoSurvivors as NoSurvivors
    from elastic.errors import RecordInvalid as RecordInvalid
    from elastic.errors import RestartsExhausted as RestartsExhausted
    from elastic.errors import Stopped as Stopped
    from elastic.errors import StoreKeyMissing as StoreKeyMissing
    from elastic.errors import StoreUnavailable as StoreUnavailable
    from elastic.expert_server import ExpertServer as ExpertServer
    from elastic.expert_server import Slabs as Slabs
    from elastic.expert_source import EachExpert as EachExpert
    from elastic.expert_source import ExpertLoader as ExpertLoader
    from elastic.expert_source import ExpertSource as ExpertSource
    from elastic.peer_experts import PeerExpertSource as PeerExpertSource
    from elastic.plan import cover_orphans as cover_orphans
    from elastic.plan import with_joiner as with_joiner
    from elastic.store import MembershipStore as MembershipStore
    from elastic.store import TCPStoreMembership as TCPStoreMembership
    from elastic.view import Member as Member
    from elastic.view import Role as Role
    from elastic.view import View as View

_HOME = {
    "Coordinator": "coordinator",
    "ElasticError": "errors",
    "Evicted": "errors",
    "ExpertLoader": "expert_source",
    "EachExpert": "expert_source",
    "ExpertServer": "expert_server",
    "ExpertSource": "expert_source",
    "ExpertsUnavailable": "errors",
    "GroupMember": "effects",
    "JoinTimeout": "errors",
    "LocalAgent": "agent",
    "Member": "view",
    "MembershipStore": "store",
    "NoSurvivors": "errors",
    "PeerExpertSource": "peer_experts",
    "RecordInvalid": "errors",
    "RestartsExhausted": "errors",
    "Role": "view",
    "Slabs": "expert_server",
    "Stopped": "errors",
    "StoreKeyMissing": "errors",
    "StoreUnavailable": "errors",
    "TCPStoreMembership": "store",
    "View": "view",
    "WorkerGroup": "agent",
    "cover_orphans": "plan",
    "with_joiner": "plan",
}

__all__ = list(_HOME)

__getattr__ = lazy_names(__name__, _HOME)
