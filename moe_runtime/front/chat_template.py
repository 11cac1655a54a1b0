"""Chat templates of Hugging Face checkpoints: messages to the prompt that the model was trained on.

Rendered by a sandboxed jinja2 with what transformers offers to templates: `raise_exception`,
`strftime_now`, `tojson` without HTML escapes, loop controls and the `generation` block.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.exceptions import TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moe_runtime.front.errors import TemplateFailed, TokenizerNotLoaded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from jinja2 import nodes
    from jinja2.parser import Parser


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's turn for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(value: object, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


class ChatTemplate:
    """One compiled template.

    Args:
        source: The template's text.
        special_tokens: Names such as `bos_token` to their text, visible to the template.

    Raises:
        TemplateFailed: The source is not a template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template: Template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise TemplateFailed(problem=str(error)) from None
        self._special_tokens = dict(special_tokens)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, options: Mapping[str, Any] | None = None
    ) -> str:
        """Return the prompt, ready for the assistant's turn.

        Args:
            messages: As in the OpenAI API, contents as plain strings.
            options: More variables for the template, such as `enable_thinking`.

        Raises:
            TemplateFailed: The template refuses the messages.
        """
        variables: dict[str, Any] = {
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **self._special_tokens,
            **(options or {}),
            "messages": messages,
        }
        try:
            return self._template.render(variables)
        # A template is a program: with messages it did not expect it fails in any of these ways.
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise TemplateFailed(problem=f"{type(error).__name__}: {error}") from None


def load_chat_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate | None:
    """Load the template of a checkpoint; `chat_template.jinja` goes before tokenizer_config.json.

    Raises:
        TokenizerNotLoaded: There is a template, but it is not understood.
    """
    path = directory / "chat_template.jinja"
    source = tokenizer_config.get("chat_template")
    if path.is_file():
        source = path.read_text(encoding="utf-8")
    elif isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source}
        source = named.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise TokenizerNotLoaded(path=str(directory), problem="chat_template is not a string")
    try:
        return ChatTemplate(source, special_tokens(tokenizer_config))
    except TemplateFailed as error:
        raise TokenizerNotLoaded(path=str(directory), problem=str(error)) from error


def special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name; an entry is a string or an added-token object."""
    found = {}
    for name, value in tokenizer_config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found
