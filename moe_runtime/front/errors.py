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

from dataclasses import field
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
    param: str | None = field(default=None, init=False)

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

    problem: str
    param: str | None = None

    def _message(self) -> str:
        return self.problem


class ContextExceeded(ApiError):
    """Prompt and budget do not fit the context."""

    status = 400
    kind = "invalid_request_error"
    code = "context_length_exceeded"

    prompt_tokens: int
    max_tokens: int
    limit: int
    param: str = field()  # to be given: without this, the base's default would stand in

    def _message(self) -> str:
        return (
            f"the context holds {self.limit} tokens, but the request needs "
            f"{self.prompt_tokens + self.max_tokens} ({self.prompt_tokens} in the prompt,"
            f" {self.max_tokens} to come)"
        )


class ModelNotFound(ApiError):
    """Another model is asked for than the one served here."""

    status = 404
    kind = "invalid_request_error"
    code = "model_not_found"
    param = "model"

    model: str
    served: str

    def _message(self) -> str:
        return f"model {self.model!r} does not exist; this server has {self.served!r}"


class BodyTooLarge(ApiError):
    """The body is larger than the front reads."""

    status = 413
    kind = "invalid_request_error"

    limit_bytes: int

    def _message(self) -> str:
        return f"the body is larger than {self.limit_bytes} bytes"


class TooManyRequests(ApiError):
    """All places for open requests are taken."""

    retryable = True
    status = 429
    kind = "rate_limit_error"
    code = "too_many_open_requests"
    retry_after_s = RETRY_AFTER_S

    num_open: int
    num_wanted: int
    limit: int

    def _message(self) -> str:
        return (
            f"{self.num_open} of {self.limit} places for open requests are taken"
            f" and {self.num_wanted} are needed; try again later"
        )


class GenerationFailed(ApiError):
    """A worker gave the request up, or every worker that tried it was lost."""

    status = 500
    kind = "server_error"
    code = "generation_failed"

    reason: str

    def _message(self) -> str:
        return f"generation failed: {self.reason}"


class Unavailable(ApiError):
    """The server takes no new requests."""

    retryable = True
    status = 503
    kind = "service_unavailable"
    code = "unavailable"
    retry_after_s = RETRY_AFTER_S

    reason: str

    def _message(self) -> str:
        return self.reason


class GenerationTimeout(ApiError):
    """No token came for longer than `front.request_timeout_s`."""

    retryable = True
    status = 504
    kind = "timeout_error"
    code = "generation_timeout"

    waited_s: float
    num_generated: int

    def _message(self) -> str:
        return f"no token for {self.waited_s:.1f} s after {self.num_generated} tokens"


class JournalError(MoeRuntimeError):
    """Tokens do not fit what the journal has."""

    retryable = True


class TokenGap(JournalError):
    """Tokens between the journal's last one and those that came are missing."""

    request_id: str
    expected_index: int
    index: int

    def _message(self) -> str:
        return (
            f"request {self.request_id}: tokens [{self.expected_index}, {self.index}) were lost"
            " on the way"
        )


class TokenMismatch(JournalError):
    """Tokens that came twice differ: the promise of equal tokens is broken somewhere."""

    request_id: str
    index: int
    expected: int | None
    found: int

    def _message(self) -> str:
        return (
            f"request {self.request_id}: token {self.index} was {self.expected} before"
            f" and is {self.found} now"
        )


class ClientGone(MoeRuntimeError):
    """The client closed the connection before its answer was complete."""

    def _message(self) -> str:
        return "the client closed the connection"


class TokenizerError(MoeRuntimeError):
    """Base of errors of the tokenizer and its chat template."""


class TokenizerNotLoaded(TokenizerError):
    """A tokenizer file is missing or not understood."""

    path: str
    problem: str

    def _message(self) -> str:
        return f"{self.path}: {self.problem}"


class TemplateFailed(TokenizerError):
    """The chat template refuses the messages, or there is none."""

    problem: str

    def _message(self) -> str:
        return f"chat template: {self.problem}"
