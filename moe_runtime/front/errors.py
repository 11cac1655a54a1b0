"""Errors of the front end.

MoeRuntimeError
├── ApiError                 what a client is told: HTTP status and an OpenAI error object
│   ├── InvalidRequest       400
│   ├── ContextExceeded      400
│   ├── ModelNotFound        404
│   ├── BodyTooLarge         413
│   ├── TooManyRequests      429, with Retry-After
│   ├── GenerationFailed     500
│   ├── Unavailable          503, with Retry-After
│   └── GenerationTimeout    504
├── JournalError             tokens that do not fit the journal; the request is submitted again
│   ├── TokenGap
│   └── TokenMismatch
├── ClientGone               the client hung up
└── TokenizerError
    ├── TokenizerNotLoaded
    └── TemplateFailed
"""

from __future__ import annotations

from typing import ClassVar

from moe_runtime.errors import MoeRuntimeError

RETRY_AFTER_S = 1


class ApiError(MoeRuntimeError):
    """Base of the errors that a client is shown.

    Attributes:
        status: HTTP status code.
        kind: `type` of the OpenAI error object.
        code: `code` of the OpenAI error object.
        param: Name of the offending parameter.
        retry_after_s: Value of the Retry-After header, if one is sent.
    """

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None
    retry_after_s: ClassVar[int | None] = None
    param: str | None = None

    def body(self) -> dict[str, object]:
        """The OpenAI error object."""
        return error_body(str(self), kind=self.kind, param=self.param, code=self.code)


def error_body(
    message: str, *, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, object]:
    """Return an OpenAI error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class InvalidRequest(ApiError):
    """The request itself is wrong; sending it again cannot help."""

    status = 400
    kind = "invalid_request_error"

    def __init__(self, *, problem: str, param: str | None = None) -> None:
        super().__init__(problem, problem=problem, param=param)
        self.param = param


class ContextExceeded(ApiError):
    """Prompt and budget do not fit the context."""

    status = 400
    kind = "invalid_request_error"
    code = "context_length_exceeded"

    def __init__(self, *, prompt_tokens: int, max_tokens: int, limit: int, param: str) -> None:
        super().__init__(
            f"the context holds {limit} tokens, but the request needs "
            f"{prompt_tokens + max_tokens} ({prompt_tokens} in the prompt, {max_tokens} to come)",
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            limit=limit,
            param=param,
        )
        self.param = param


class ModelNotFound(ApiError):
    """Another model is asked for than the one served here."""

    status = 404
    kind = "invalid_request_error"
    code = "model_not_found"
    param = "model"

    def __init__(self, *, model: str, served: str) -> None:
        message = f"model {model!r} does not exist; this server has {served!r}"
        super().__init__(message, model=model, served=served)


class BodyTooLarge(ApiError):
    """The body is larger than the front reads."""

    status = 413
    kind = "invalid_request_error"

    def __init__(self, *, limit_bytes: int) -> None:
        super().__init__(f"the body is larger than {limit_bytes} bytes", limit_bytes=limit_bytes)


class TooManyRequests(ApiError):
    """All places for open requests are taken."""

    retryable = True
    status = 429
    kind = "rate_limit_error"
    code = "too_many_open_requests"
    retry_after_s = RETRY_AFTER_S

    def __init__(self, *, num_open: int, num_wanted: int, limit: int) -> None:
        super().__init__(
            f"{num_open} of {limit} places for open requests are taken and {num_wanted} are needed;"
            " try again later",
            num_open=num_open,
            num_wanted=num_wanted,
            limit=limit,
        )


class GenerationFailed(ApiError):
    """A worker gave the request up, or every worker that tried it was lost."""

    status = 500
    kind = "server_error"
    code = "generation_failed"

    def __init__(self, *, reason: str) -> None:
        super().__init__(f"generation failed: {reason}", reason=reason)


class Unavailable(ApiError):
    """The server takes no new requests."""

    retryable = True
    status = 503
    kind = "service_unavailable"
    code = "unavailable"
    retry_after_s = RETRY_AFTER_S

    def __init__(self, *, reason: str) -> None:
        super().__init__(reason, reason=reason)


class GenerationTimeout(ApiError):
    """No token came for longer than `front.request_timeout_s`."""

    retryable = True
    status = 504
    kind = "timeout_error"
    code = "generation_timeout"

    def __init__(self, *, waited_s: float, num_generated: int) -> None:
        super().__init__(
            f"no token for {waited_s:.1f} s after {num_generated} tokens",
            waited_s=waited_s,
            num_generated=num_generated,
        )


class JournalError(MoeRuntimeError):
    """Tokens do not fit what the journal has."""

    retryable = True


class TokenGap(JournalError):
    """Tokens between the journal's last one and those that came are missing."""

    def __init__(self, *, request_id: str, expected_index: int, index: int) -> None:
        super().__init__(
            f"request {request_id}: tokens [{expected_index}, {index}) were lost on the way",
            request_id=request_id,
            expected_index=expected_index,
            index=index,
        )


class TokenMismatch(JournalError):
    """Tokens that came twice differ: the promise of equal tokens is broken somewhere."""

    def __init__(self, *, request_id: str, index: int, expected: int | None, found: int) -> None:
        super().__init__(
            f"request {request_id}: token {index} was {expected} before and is {found} now",
            request_id=request_id,
            index=index,
            expected=expected,
            found=found,
        )


class ClientGone(MoeRuntimeError):
    """The client closed the connection before its answer was complete."""

    def __init__(self) -> None:
        super().__init__("the client closed the connection")


class TokenizerError(MoeRuntimeError):
    """Base of errors of the tokenizer and its chat template."""


class TokenizerNotLoaded(TokenizerError):
    """A tokenizer file is missing or not understood."""

    def __init__(self, *, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}", path=path, problem=problem)


class TemplateFailed(TokenizerError):
    """The chat template refuses the messages, or there is none."""

    def __init__(self, *, problem: str) -> None:
        super().__init__(f"chat template: {problem}", problem=problem)
