"""Messages between the front and the workers: msgspec structs, msgpack on the wire.

    worker -> front    Hello  Tokens  Load  ViewCommitted  Goodbye
    front -> worker    Submit  Cancel  Drain  Stop

A worker's messages carry its incarnation; the front drops those whose incarnation is not the
identity of the connection they came on. Both ends of one link see messages in the order sent, but
a broken connection loses those in flight, so every token says its place (`TokenItem.index`).
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from moe_runtime.errors import MoeRuntimeError

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
FinishReason: TypeAlias = Literal["stop", "length", "error"]


class MessageInvalid(MoeRuntimeError):
    """The bytes are not a message of the expected direction."""

    direction: str
    problem: str
    nbytes: int

    def _message(self) -> str:
        return f"{self.direction} message of {self.nbytes} bytes is not valid: {self.problem}"


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A worker is ready to take requests as soon as a view names it."""

    incarnation: str
    rank: Count
    epoch: Count
    max_context_tokens: Count
    kv_pages: Count


class TokenItem(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request.

    Attributes:
        request_id: As in `Submit`, unchanged.
        index: Tokens generated before this item, those of earlier owners included.
        token_ids: The new tokens; may be empty when the item only ends the request.
        finish_reason: Set on the last item of a request. With "stop" the last token is the stop
            token (end of sequence or one of `stop_token_ids`); its text is not shown.
        cached_tokens: Prompt tokens whose KV was found and not computed.
        error: One line for the client, with finish_reason "error".
    """

    request_id: str
    index: Count
    token_ids: list[Count]
    finish_reason: FinishReason | None = None
    cached_tokens: Count = 0
    error: str | None = None


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """What one pass generated on one worker."""

    incarnation: str
    items: list[TokenItem]


class Load(msgspec.Struct, frozen=True, tag=True):
    """How busy a worker is; sent every half second and after each view change.

    Attributes:
        counters: Totals of this life.
        gauges: Values of this moment, `moe_runtime.dispatch_load` names them.
    """

    incarnation: str
    running: Count
    waiting: Count
    free_pages: Count
    num_pages: Count
    epoch: Count
    counters: dict[str, float]
    gauges: dict[str, float] = {}


class ViewCommitted(msgspec.Struct, frozen=True, tag=True):
    """A worker saw a view committed. Every member sends it; the first one counts.

    Attributes:
        view: `elastic.View.encode()`.
        members: Incarnations of the view's members.
        epoch: The view's epoch.
    """

    incarnation: str
    view: bytes
    members: list[str]
    epoch: Count


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """A worker ends; it will send no more tokens."""

    incarnation: str


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Generate for one request, from its beginning or on from the tokens it already has.

    Attributes:
        request_id: Opaque to the worker. Another attempt at the same request has another id.
        prompt_ids: The prompt.
        output_ids: Generated so far by earlier owners; generation goes on after them.
        temperature: 0 is greedy.
        top_p: In (0, 1]; 1 keeps all.
        top_k: 0 keeps all.
        seed: In [0, 2**63); the token at each position is a function of seed and position.
        max_tokens: Total budget of generated tokens, `output_ids` included.
        stop_token_ids: Tokens that end the request, beside the end of sequence.
        ignore_eos: The end of sequence does not end the request.
        min_tokens: No stop token may be sampled before this many tokens.
    """

    request_id: str
    prompt_ids: list[Count]
    output_ids: list[Count]
    temperature: float
    top_p: float
    top_k: Count
    seed: Count
    max_tokens: Count
    stop_token_ids: list[Count]
    ignore_eos: bool
    min_tokens: Count


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Forget a request; unknown ids are ignored."""

    request_id: str


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Leave the group in a planned way."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End now."""


WorkerMessage: TypeAlias = Hello | Tokens | Load | ViewCommitted | Goodbye
FrontMessage: TypeAlias = Submit | Cancel | Drain | Stop

_encoder = msgspec.msgpack.Encoder()
_worker_decoder = msgspec.msgpack.Decoder(WorkerMessage)
_front_decoder = msgspec.msgpack.Decoder(FrontMessage)


def encode(message: WorkerMessage | FrontMessage) -> bytes:
    """Return the message as it goes on the wire."""
    return _encoder.encode(message)


def decode_worker_message(data: bytes) -> WorkerMessage:
    """Read a message of a worker, at the front.

    Raises:
        MessageInvalid: The bytes are no such message.
    """
    try:
        return _worker_decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise MessageInvalid(direction="worker", problem=str(error), nbytes=len(data)) from None


def decode_front_message(data: bytes) -> FrontMessage:
    """Read a message of the front, at a worker.

    Raises:
        MessageInvalid: The bytes are no such message.
    """
    try:
        return _front_decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise MessageInvalid(direction="front", problem=str(error), nbytes=len(data)) from None
