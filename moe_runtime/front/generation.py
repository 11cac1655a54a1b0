"""One answer being generated: tokens come in from the relay, pieces of text go out to the client.

An answer has one or more generations (`n`, several prompts) and one queue that all of them fill,
so that reading it needs no tasks. The queue is bounded by the token budgets of the generations.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moe_runtime.front.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from moe_runtime.front.detokenizer import Detokenizer
    from moe_runtime.front.stop_strings import StopStrings


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one message of a worker adds to a generation.

    Attributes:
        choice: Index of the generation in its answer.
        text: May be empty: characters and possible stop strings are held back until complete.
        token_ids: The tokens that arrived, those that have no text yet or ever included.
        finish_reason: Set on the last piece.
    """

    choice: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a whole answer."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Generation:
    """Turns the tokens of one request into text, up to its end or its first stop string.

    Args:
        request_id: Its name in the journal.
        choice: Its index in the answer.
        prompt_tokens: Length of the prompt.
        detokenizer: Fresh.
        stop_strings: Fresh.
        min_tokens: The text of this many tokens is not searched for stop strings.
        queue: Where pieces, or the error that ended it, go.
    """

    def __init__(
        self,
        *,
        request_id: str,
        choice: int,
        prompt_tokens: int,
        detokenizer: Detokenizer,
        stop_strings: StopStrings,
        min_tokens: int,
        queue: asyncio.Queue[Piece | ApiError],
    ) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.last_token_at: float | None = None
        self.is_over = False
        self._choice = choice
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._min_tokens = min_tokens
        self._queue = queue

    def deliver(self, token_ids: Sequence[int], finish_reason: str | None) -> bool:
        """Take new tokens.

        Returns:
            Whether a stop string ended the generation here; its worker need not go on.
        """
        if self.is_over:
            return False
        text, taken = "", 0
        for position, token_id in enumerate(token_ids):
            taken += 1
            self.completion_tokens += 1
            is_stop_token = finish_reason == "stop" and position == len(token_ids) - 1
            if not is_stop_token:
                text += self._searched(self._detokenizer.push(token_id))
            if self._stop_strings.found is not None:
                break
        if finish_reason is not None and self._stop_strings.found is None:
            text += self._searched(self._detokenizer.flush())
            text += self._stop_strings.flush()
        stopped = self._stop_strings.found is not None
        reason = "stop" if stopped else finish_reason
        self.is_over = reason is not None
        self._queue.put_nowait(
            Piece(
                choice=self._choice,
                text=text,
                token_ids=tuple(token_ids[:taken]),
                finish_reason=reason,
            )
        )
        return stopped

    def fail(self, error: ApiError) -> None:
        """End it with an error."""
        if not self.is_over:
            self.is_over = True
            self._queue.put_nowait(error)

    def _searched(self, text: str) -> str:
        if self.completion_tokens <= self._min_tokens:
            return text
        return self._stop_strings.push(text)


@dataclass(slots=True, kw_only=True)
class Answer:
    """The generations that answer one HTTP request, in the order of their choices.

    Attributes:
        queue: Shared by the generations.
        generations: Filled by the one who opens them.
        close_generation: Tells the journal that nobody reads a generation any more.
    """

    close_generation: Callable[[Generation], None]
    queue: asyncio.Queue[Piece | ApiError] = field(default_factory=asyncio.Queue)
    generations: list[Generation] = field(default_factory=list)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield pieces until every generation is over.

        Raises:
            ApiError: A generation failed; the others are not waited for.
        """
        open_choices = len(self.generations)
        while open_choices:
            piece = await self.queue.get()
            if isinstance(piece, ApiError):
                raise piece
            open_choices -= piece.finish_reason is not None
            yield piece

    def usage(self) -> Usage:
        """Tokens so far; prompts that several choices share count once."""
        prompts: dict[str, Generation] = {}
        for generation in self.generations:
            # request ids end in "-<prompt>-<choice of the prompt>"
            prompts.setdefault(generation.request_id.rpartition("-")[0], generation)
        return Usage(
            prompt_tokens=sum(g.prompt_tokens for g in prompts.values()),
            completion_tokens=sum(g.completion_tokens for g in self.generations),
            cached_tokens=sum(g.cached_tokens for g in prompts.values()),
        )

    def close(self) -> None:
        """Free everything; may be called at any time and often."""
        for generation in self.generations:
            self.close_generation(generation)
