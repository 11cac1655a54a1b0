"""Requests to a store master and its replies: one request, exactly one reply.

One request carries many keys. What belongs to many blocks travels as columns (lists of equal
length), and segments are named once per message and then by index.

    Register    node     -> Registered       Remove        client  -> Done
    Hold        node     -> Registered       SetPin        client  -> Done
    Heartbeat   node     -> Known            ReportBad     client  -> Done
    NextCopies  node     -> Copies           Fence         anyone  -> Done
    Leave       node     -> Done             Observe       anyone  -> MasterStatistics
    Enter       client   -> Entered          ListBlocks    admin   -> BlockList
    Lookup      client   -> Located          ListSegments  admin   -> SegmentList
    Renew       client   -> Renewed          Drain         admin   -> Draining
    Release     client   -> Done             Rebalance     admin   -> Done
    Allocate    client   -> Allocated        ListTenants   admin   -> TenantList
    Finish      client   -> Finished         SetQuota      admin   -> Done
    Reserve     client   -> Reserved         Store         client  -> Stored
    Exists      client   -> Present          ListWriters   admin   -> WriterList
    WritersAt   node     -> WritersThere     WritesOver    node    -> Done
    Describe    client   -> Done             any illegal one       -> Refused

Peer notes (`TransferEngine.notify`): AskSegment client -> node, OfferSegment node -> client,
Written and Unwritten client -> node.
"""

from __future__ import annotations

import msgspec

from kvstore.wire.columns import (
    KEYS_MAX as KEYS_MAX,
)
from kvstore.wire.columns import (
    Copy as Copy,
)
from kvstore.wire.columns import (
    Count as Count,
)
from kvstore.wire.columns import (
    HeldBlocks as HeldBlocks,
)
from kvstore.wire.columns import (
    Incarnation as Incarnation,
)
from kvstore.wire.columns import (
    Key as Key,
)
from kvstore.wire.columns import (
    Keys as Keys,
)
from kvstore.wire.columns import (
    Label as Label,
)
from kvstore.wire.columns import (
    Medium as Medium,
)
from kvstore.wire.columns import (
    NodeAddress as NodeAddress,
)
from kvstore.wire.columns import (
    Pin as Pin,
)
from kvstore.wire.columns import (
    PinChanges as PinChanges,
)
from kvstore.wire.columns import (
    Place as Place,
)
from kvstore.wire.columns import (
    PutOutcome as PutOutcome,
)
from kvstore.wire.columns import (
    RefusalReason as RefusalReason,
)
from kvstore.wire.replies import (
    Allocated as Allocated,
)
from kvstore.wire.replies import (
    BlockList as BlockList,
)
from kvstore.wire.replies import (
    Copies as Copies,
)
from kvstore.wire.replies import (
    Done as Done,
)
from kvstore.wire.replies import (
    Draining as Draining,
)
from kvstore.wire.replies import (
    Entered as Entered,
)
from kvstore.wire.replies import (
    Finished as Finished,
)
from kvstore.wire.replies import (
    Known as Known,
)
from kvstore.wire.replies import (
    Located as Located,
)
from kvstore.wire.replies import (
    MasterStatistics as MasterStatistics,
)
from kvstore.wire.replies import (
    Present as Present,
)
from kvstore.wire.replies import (
    Refused as Refused,
)
from kvstore.wire.replies import (
    Registered as Registered,
)
from kvstore.wire.replies import (
    Renewed as Renewed,
)
from kvstore.wire.replies import (
    Reply as Reply,
)
from kvstore.wire.replies import (
    Reserved as Reserved,
)
from kvstore.wire.replies import (
    SegmentFigures as SegmentFigures,
)
from kvstore.wire.replies import (
    SegmentList as SegmentList,
)
from kvstore.wire.replies import (
    Stored as Stored,
)
from kvstore.wire.replies import (
    TenantFigures as TenantFigures,
)
from kvstore.wire.replies import (
    TenantList as TenantList,
)
from kvstore.wire.replies import (
    WriterFigures as WriterFigures,
)
from kvstore.wire.replies import (
    WriterList as WriterList,
)
from kvstore.wire.replies import (
    WritersThere as WritersThere,
)
from kvstore.wire.requests import (
    Allocate as Allocate,
)
from kvstore.wire.requests import (
    Describe as Describe,
)
from kvstore.wire.requests import (
    Drain as Drain,
)
from kvstore.wire.requests import (
    Enter as Enter,
)
from kvstore.wire.requests import (
    Exists as Exists,
)
from kvstore.wire.requests import (
    Fence as Fence,
)
from kvstore.wire.requests import (
    Finish as Finish,
)
from kvstore.wire.requests import (
    Heartbeat as Heartbeat,
)
from kvstore.wire.requests import (
    Hold as Hold,
)
from kvstore.wire.requests import (
    Leave as Leave,
)
from kvstore.wire.requests import (
    ListBlocks as ListBlocks,
)
from kvstore.wire.requests import (
    ListSegments as ListSegments,
)
from kvstore.wire.requests import (
    ListTenants as ListTenants,
)
from kvstore.wire.requests import (
    ListWriters as ListWriters,
)
from kvstore.wire.requests import (
    Lookup as Lookup,
)
from kvstore.wire.requests import (
    NextCopies as NextCopies,
)
from kvstore.wire.requests import (
    Observe as Observe,
)
from kvstore.wire.requests import (
    Rebalance as Rebalance,
)
from kvstore.wire.requests import (
    Register as Register,
)
from kvstore.wire.requests import (
    Release as Release,
)
from kvstore.wire.requests import (
    Remove as Remove,
)
from kvstore.wire.requests import (
    Renew as Renew,
)
from kvstore.wire.requests import (
    ReportBad as ReportBad,
)
from kvstore.wire.requests import (
    Request as Request,
)
from kvstore.wire.requests import (
    Reserve as Reserve,
)
from kvstore.wire.requests import (
    SetPin as SetPin,
)
from kvstore.wire.requests import (
    SetQuota as SetQuota,
)
from kvstore.wire.requests import (
    Settled as Settled,
)
from kvstore.wire.requests import (
    Store as Store,
)
from kvstore.wire.requests import (
    WritersAt as WritersAt,
)
from kvstore.wire.requests import (
    WritesOver as WritesOver,
)

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """Return the MessagePack form of a request or reply."""
    return _encoder.encode(message)


def decode_request(payload: bytes) -> Request:
    """Read a request. Raises msgspec.MsgspecError if it is none."""
    return _request_decoder.decode(payload)


def decode_reply(payload: bytes) -> Reply:
    """Read a reply. Raises msgspec.MsgspecError if it is none."""
    return _reply_decoder.decode(payload)
