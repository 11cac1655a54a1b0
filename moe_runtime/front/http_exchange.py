"""One HTTP exchange: a bounded body in, a whole answer or a stream of events out.

Whatever ends the exchange, the answer is closed: the client got all of it, it hung up, a worker
failed it, or the server is torn down.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from moe_runtime.front.errors import ApiError, BodyTooLarge, ClientGone

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine, Mapping

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from moe_runtime.front.service import OpenAnswer

BODY_BYTES_MAX = 16 << 20
_encode_json = msgspec.json.Encoder().encode
#: line ends to Unicode and to clients that split a stream with `str.splitlines`, not to JSON
_LINE_ENDS = {
    "\u0085".encode(): b"\\u0085",
    "\u2028".encode(): b"\\u2028",
    "\u2029".encode(): b"\\u2029",
}


async def read_body(request: Request) -> bytes:
    """Return the body.

    Raises:
        BodyTooLarge: It is longer than `BODY_BYTES_MAX`.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES_MAX:
            raise BodyTooLarge(limit_bytes=BODY_BYTES_MAX)
    return bytes(body)


def json_response(
    content: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a JSON response."""
    return Response(
        _encode_json(content),
        status_code=status,
        media_type="application/json",
        headers=dict(headers or {}),
    )


def error_response(error: ApiError) -> Response:
    """Return an error as the OpenAI API does."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    return json_response(error.body(), status=error.status, headers=headers)


async def whole_answer(request: Request, opened: OpenAnswer) -> Response:
    """Wait for the whole answer.

    Raises:
        ApiError: A generation failed.
        ClientGone: The client hung up.
    """
    try:
        content = await _unless_disconnected(request.receive, _collect(opened))
    finally:
        opened.answer.close()
    return json_response(content, headers=_identity(opened))


class EventStream(Response):
    """Server-sent events of an answer, until it is over or the client hangs up."""

    media_type = "text/event-stream"

    def __init__(self, opened: OpenAnswer, *, include_usage: bool) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", **_identity(opened)})
        del self.headers["content-length"]
        self._opened = opened
        self._include_usage = include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; an ASGI application."""
        try:
            await _unless_disconnected(receive, self._send_all(send))
        except ClientGone:
            pass  # nobody is left to be told
        finally:
            self._opened.answer.close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(_events(self._opened, include_usage=self._include_usage)) as events:
            async for event in events:
                data = event if isinstance(event, bytes) else _encode_line(event)
                await send(
                    {
                        "type": "http.response.body",
                        "body": b"data: " + data + b"\n\n",
                        "more_body": True,
                    }
                )
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _encode_line(event: object) -> bytes:
    """Encode as JSON that is one line to everybody."""
    line = _encode_json(event)
    for text, escape in _LINE_ENDS.items():
        line = line.replace(text, escape)
    return line


async def _events(
    opened: OpenAnswer, *, include_usage: bool
) -> AsyncGenerator[dict[str, Any] | bytes, None]:
    """Yield the chunks of a stream; a failure in mid-stream is an event of its own."""
    writer = opened.writer
    # Clients that ask for usage find the key in every chunk.
    extra = {"usage": None} if include_usage else {}
    for choice in opened.choices:
        opening = writer.opening(choice)
        if opening is not None:
            yield {**opening, **extra}
    try:
        async for piece in opened.answer.pieces():
            shown = list(piece.token_ids) if writer.envelope.return_token_ids else []
            if piece.text or shown:
                yield {**writer.delta(piece.choice, piece.text, shown), **extra}
            if piece.finish_reason is not None:
                yield {**writer.finish(piece.choice, piece.finish_reason), **extra}
    except ApiError as error:
        yield error.body()
    else:
        if include_usage:
            yield writer.usage(opened.answer.usage())
    yield b"[DONE]"


async def _collect(opened: OpenAnswer) -> dict[str, Any]:
    async for piece in opened.answer.pieces():
        choice = opened.choices[piece.choice]
        choice.text += piece.text
        choice.token_ids.extend(piece.token_ids)
        choice.finish_reason = piece.finish_reason
    return opened.writer.whole(opened.choices, opened.answer.usage())


async def _unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
    """Run `work` until it ends or the client hangs up.

    Raises:
        ClientGone: The client hung up first.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _identity(opened: OpenAnswer) -> dict[str, str]:
    return {"X-Request-Id": opened.writer.envelope.response_id}
