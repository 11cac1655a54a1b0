"""The checkpoint's tokenizer: text to ids and back, and the chat template."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as _Tokenizer

from moe_runtime.front.chat_template import ChatTemplate, load_chat_template
from moe_runtime.front.errors import TemplateFailed, TokenizerNotLoaded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

#: longer texts are encoded on another thread, so that streams go on meanwhile
LONG_TEXT_CHARACTERS = 4096


class Tokenizer:
    """Thread-safe: nothing changes after construction."""

    def __init__(
        self, tokenizer: _Tokenizer, *, chat_template: ChatTemplate | None, vocab_size: int
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self.vocab_size = vocab_size

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Load tokenizer.json, tokenizer_config.json and the template of a checkpoint.

        Raises:
            TokenizerNotLoaded: A file is missing or not understood.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise TokenizerNotLoaded(path=str(path), problem="no such file")
        try:
            tokenizer = _Tokenizer.from_file(str(path))
        # The library raises plain Exception for all that it does not understand.
        except Exception as error:  # noqa: BLE001
            raise TokenizerNotLoaded(path=str(path), problem=str(error)) from None
        tokenizer.no_padding()
        tokenizer.no_truncation()
        settings = read_json(directory / "tokenizer_config.json")
        model = read_json(directory / "config.json")
        return cls(
            tokenizer,
            chat_template=load_chat_template(directory, settings),
            vocab_size=int(model.get("vocab_size") or tokenizer.get_vocab_size()),
        )

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""
        if len(text) <= LONG_TEXT_CHARACTERS:
            return self._encode(text, add_special_tokens)
        return await asyncio.to_thread(self._encode, text, add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids; special and unknown ones give none."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, options: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return the ids of a conversation, ready for the assistant's turn.

        Raises:
            TemplateFailed: The checkpoint has no template, or it refuses the messages.
        """
        if self._chat_template is None:
            raise TemplateFailed(problem="this model has none; use /v1/completions")
        text = self._chat_template.render(messages, options=options)
        return await self.encode(text, add_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; an absent file is an empty one.

    Raises:
        TokenizerNotLoaded: The file is no JSON object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise TokenizerNotLoaded(path=str(path), problem=str(error)) from None
    if not isinstance(found, dict):
        raise TokenizerNotLoaded(path=str(path), problem="not a JSON object")
    return found
