"""From a checked request to an open answer: prompts to ids, budgets, seeds, generations."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_runtime.front.detokenizer import Detokenizer
from moe_runtime.front.errors import (
    ContextExceeded,
    InvalidRequest,
    ModelNotFound,
    TemplateFailed,
)
from moe_runtime.front.generation import Answer, Generation
from moe_runtime.front.journal_records import Sampling
from moe_runtime.front.openai_response import ChatWriter, Choice, CompletionWriter, Envelope
from moe_runtime.front.openai_schema import CompletionRequest
from moe_runtime.front.stop_strings import StopStrings

if TYPE_CHECKING:
    from moe_runtime.front.openai_response import Writer
    from moe_runtime.front.openai_schema import ChatRequest, SamplingRequest
    from moe_runtime.front.relay import Relay
    from moe_runtime.front.tokenizer import Tokenizer

SEED_RANGE = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAnswer:
    """An answer on its way, and how it is to be written."""

    answer: Answer
    choices: list[Choice]
    writer: Writer


class Service:
    """Opens answers.

    Args:
        model_name: The one model served.
        tokenizer: Its tokenizer.
        relay: Where requests go.
        context_tokens: Prompt + output limit until a worker tells its own.
    """

    def __init__(
        self, *, model_name: str, tokenizer: Tokenizer, relay: Relay, context_tokens: int
    ) -> None:
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.relay = relay
        self.created = int(time.time())
        self._context_tokens = context_tokens

    @property
    def max_context_tokens(self) -> int:
        """Prompt + output limit."""
        return self.relay.router.max_context_tokens() or self._context_tokens

    async def complete(self, query: CompletionRequest) -> OpenAnswer:
        """Open the answer to a completion.

        Raises:
            ApiError: The request cannot be served, or not now.
        """
        self._check_model(query)
        prompts, openings = [], []
        for prompt in query.prompts:
            ids = await self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            self._check_ids(ids, "prompt")
            prompts.append(ids)
            text = prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)
            openings.append(text if query.echo else "")
        max_tokens = query.max_tokens or query.default_max_tokens
        self._check_context(prompts, max_tokens, "prompt")
        envelope = self._envelope("cmpl", query)
        opened = self._open(query, envelope.response_id, prompts, max_tokens)
        count = query.n or 1
        choices = [
            Choice(index=index, opening=openings[index // count])
            for index in range(len(prompts) * count)
        ]
        return OpenAnswer(answer=opened, choices=choices, writer=CompletionWriter(envelope))

    async def chat(self, query: ChatRequest) -> OpenAnswer:
        """Open the answer to a conversation.

        Raises:
            ApiError: The request cannot be served, or not now.
        """
        self._check_model(query)
        messages = [message.for_template() for message in query.messages]
        try:
            ids = await self.tokenizer.encode_chat(messages, options=query.chat_template_kwargs)
        except TemplateFailed as error:
            raise InvalidRequest(problem=str(error), param="messages") from None
        self._check_ids(ids, "messages")
        max_tokens = query.max_completion_tokens or query.max_tokens
        self._check_context([ids], max_tokens or 1, "messages")
        envelope = self._envelope("chatcmpl", query)
        budget = max_tokens or self.max_context_tokens - len(ids)
        answer = self._open(query, envelope.response_id, [ids], budget)
        choices = [Choice(index=index) for index in range(query.n or 1)]
        return OpenAnswer(answer=answer, choices=choices, writer=ChatWriter(envelope))

    def _check_model(self, query: SamplingRequest) -> None:
        if query.model is not None and query.model != self.model_name:
            raise ModelNotFound(model=query.model, served=self.model_name)

    def _check_ids(self, ids: list[int], param: str) -> None:
        if not ids:
            raise InvalidRequest(problem=f"{param} has no tokens", param=param)
        largest = max(ids)
        if largest >= self.tokenizer.vocab_size:
            problem = f"token id {largest} is not in the vocabulary of {self.tokenizer.vocab_size}"
            raise InvalidRequest(problem=problem, param=param)

    def _check_context(self, prompts: list[list[int]], max_tokens: int, param: str) -> None:
        longest, limit = max(map(len, prompts)), self.max_context_tokens
        if longest + max_tokens > limit:
            # A prompt that fits by itself leaves the budget to blame.
            blamed = param if longest >= limit else "max_tokens"
            raise ContextExceeded(
                prompt_tokens=longest, max_tokens=max_tokens, limit=limit, param=blamed
            )

    def _envelope(self, prefix: str, query: SamplingRequest) -> Envelope:
        return Envelope(
            response_id=f"{prefix}-{secrets.token_hex(12)}",
            created=int(time.time()),
            model=self.model_name,
            return_token_ids=bool(query.return_token_ids),
        )

    def _open(
        self, query: SamplingRequest, response_id: str, prompts: list[list[int]], max_tokens: int
    ) -> Answer:
        count = query.n or 1
        self.relay.check_admission(len(prompts) * count)
        # Always fixed, so that another worker goes on with the same tokens.
        seed = secrets.randbelow(SEED_RANGE) if query.seed is None else query.seed
        answer = Answer(close_generation=self.relay.close)
        for prompt_index, prompt in enumerate(prompts):
            for number in range(count):
                generation = Generation(
                    request_id=f"{response_id}-{prompt_index}-{number}",
                    choice=len(answer.generations),
                    prompt_tokens=len(prompt),
                    detokenizer=Detokenizer(self.tokenizer, prompt_ids=prompt),
                    stop_strings=StopStrings(
                        query.stop_strings, include=bool(query.include_stop_str_in_output)
                    ),
                    min_tokens=query.min_tokens or 0,
                    queue=answer.queue,
                )
                answer.generations.append(generation)
                sampling = _sampling(query, (seed + number) % SEED_RANGE, max_tokens)
                self.relay.open(generation, prompt, sampling)
        return answer


def _sampling(query: SamplingRequest, seed: int, max_tokens: int) -> Sampling:
    return Sampling(
        seed=seed,
        max_tokens=max_tokens,
        temperature=1.0 if query.temperature is None else query.temperature,
        top_p=1.0 if query.top_p is None else query.top_p,
        top_k=max(0, query.top_k or 0),  # clients say -1 for "all"
        stop_token_ids=tuple(query.stop_token_ids or ()),
        ignore_eos=bool(query.ignore_eos),
        min_tokens=min(query.min_tokens or 0, max_tokens),
    )
