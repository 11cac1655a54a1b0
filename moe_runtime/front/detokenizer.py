"""Tokens to text, one token at a time.

A token's bytes may end within a character, and its text may depend on the tokens before it (a
leading space), so text is decoded over a window:

    token_ids   .. [context) [pending)
                   |         |        len
                   context   settled
    new text = decode(context + pending) minus decode(context)

and is given out once it does not end in an incomplete character. The text is a function of the
token sequence alone: however the tokens arrive, in ones or in many, it is the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

REPLACEMENT = "\ufffd"
#: prompt tokens before the output that its first text may depend on
CONTEXT_TOKENS = 5
#: a character has at most 4 bytes, so an end that stays broken this long is no character
PENDING_TOKENS_MAX = 16


class Decoder(Protocol):
    """What a detokenizer needs of a tokenizer."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text; special tokens give none."""
        ...


class Detokenizer:
    """The text of one growing token sequence."""

    def __init__(self, decoder: Decoder, *, prompt_ids: Sequence[int] = ()) -> None:
        self._decoder = decoder
        self._context = list(prompt_ids[-CONTEXT_TOKENS:])
        self._context_text = decoder.decode(self._context) if self._context else ""
        if self._context_text.endswith(REPLACEMENT):
            self._context, self._context_text = [], ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Add one token; returns the text that it completes, possibly none."""
        self._pending.append(token_id)
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._pending) < PENDING_TOKENS_MAX:
            return ""
        if not text and len(self._pending) < PENDING_TOKENS_MAX:
            return ""  # a special token, or the first half of something that decodes to nothing yet
        self._settle()
        return text

    def flush(self) -> str:
        """End the sequence; returns what was held back, broken characters included."""
        text = self._new_text() if self._pending else ""
        self._settle()
        return text

    def _new_text(self) -> str:
        return self._decoder.decode(self._context + self._pending)[len(self._context_text) :]

    def _settle(self) -> None:
        if self._pending:
            self._context = self._pending
            self._context_text = self._decoder.decode(self._context)
            self._pending = []
