"""Answers of the OpenAI API: whole objects, and the chunks of a stream.

A chat stream begins with a chunk that tells the role; both kinds end each choice with a chunk
that has only the finish reason, then the usage if it was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from moe_runtime.front.generation import Usage


@dataclass(slots=True, kw_only=True)
class Choice:
    """One choice as far as it has arrived.

    Attributes:
        index: Its place in the answer.
        opening: What comes before the generated text (`echo`).
    """

    index: int
    opening: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What all objects of one answer share."""

    response_id: str
    created: int
    model: str
    return_token_ids: bool

    def wrap(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return an object of this answer."""
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "choices": choices,
        }

    def with_tokens(self, choice: dict[str, Any], token_ids: list[int]) -> dict[str, Any]:
        """Add the token ids to a choice, if they were asked for."""
        return {**choice, "token_ids": token_ids} if self.return_token_ids else choice


class Writer(Protocol):
    """Writes one kind of answer."""

    envelope: Envelope

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """The first chunk of a choice, if it has one."""
        ...

    def delta(self, index: int, text: str, token_ids: list[int]) -> dict[str, Any]:
        """A chunk with new text."""
        ...

    def finish(self, index: int, reason: str) -> dict[str, Any]:
        """The last chunk of a choice."""
        ...

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The chunk with the usage and no choices."""
        ...

    def whole(self, choices: list[Choice], usage: Usage) -> dict[str, Any]:
        """The answer in one object."""
        ...


class CompletionWriter:
    """Writes answers of /v1/completions."""

    kind = "text_completion"

    def __init__(self, envelope: Envelope) -> None:
        self.envelope = envelope

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """The echoed prompt."""
        return self.delta(choice.index, choice.opening, []) if choice.opening else None

    def delta(self, index: int, text: str, token_ids: list[int]) -> dict[str, Any]:
        """A chunk with new text."""
        return self._chunk(index, text, token_ids, None)

    def finish(self, index: int, reason: str) -> dict[str, Any]:
        """The last chunk of a choice."""
        return self._chunk(index, "", [], reason)

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The chunk with the usage and no choices."""
        return {**self.envelope.wrap(self.kind, []), "usage": usage_object(usage)}

    def whole(self, choices: list[Choice], usage: Usage) -> dict[str, Any]:
        """The answer in one object."""
        written = [
            self._choice(c.index, c.opening + c.text, c.token_ids, c.finish_reason) for c in choices
        ]
        return {**self.envelope.wrap(self.kind, written), "usage": usage_object(usage)}

    def _chunk(
        self, index: int, text: str, token_ids: list[int], reason: str | None
    ) -> dict[str, Any]:
        return self.envelope.wrap(self.kind, [self._choice(index, text, token_ids, reason)])

    def _choice(
        self, index: int, text: str, token_ids: list[int], reason: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
        return self.envelope.with_tokens(choice, token_ids)


class ChatWriter:
    """Writes answers of /v1/chat/completions."""

    kind = "chat.completion.chunk"

    def __init__(self, envelope: Envelope) -> None:
        self.envelope = envelope

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """The role."""
        return self._chunk(choice.index, {"role": "assistant", "content": ""}, [], None)

    def delta(self, index: int, text: str, token_ids: list[int]) -> dict[str, Any]:
        """A chunk with new text."""
        return self._chunk(index, {"content": text}, token_ids, None)

    def finish(self, index: int, reason: str) -> dict[str, Any]:
        """The last chunk of a choice."""
        return self._chunk(index, {}, [], reason)

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The chunk with the usage and no choices."""
        return {**self.envelope.wrap(self.kind, []), "usage": usage_object(usage)}

    def whole(self, choices: list[Choice], usage: Usage) -> dict[str, Any]:
        """The answer in one object."""
        written = []
        for choice in choices:
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            entry = {
                "index": choice.index,
                "message": message,
                "logprobs": None,
                "finish_reason": choice.finish_reason,
            }
            written.append(self.envelope.with_tokens(entry, choice.token_ids))
        return {
            **self.envelope.wrap("chat.completion", written),
            "usage": usage_object(usage),
        }

    def _chunk(
        self, index: int, delta: dict[str, str], token_ids: list[int], reason: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self.envelope.wrap(self.kind, [self.envelope.with_tokens(choice, token_ids)])


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return usage as the OpenAI API has it."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
