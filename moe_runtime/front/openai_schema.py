"""Requests of the OpenAI API, as far as they are served here.

Every field is checked strictly (no number out of a string). A parameter that clients send but that
is not served is declared in `NEUTRAL`: its neutral values pass, others are refused by name.
A parameter that is not declared at all is refused too: ignoring it would answer another question.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moe_runtime.front.errors import InvalidRequest

CHOICES_MAX = 128
STOP_STRINGS_MAX = 16
STOP_STRING_CHARACTERS_MAX = 1024
INT64 = 2**63

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, Field(min_length=1, max_length=STOP_STRING_CHARACTERS_MAX)]

#: Not served, except with one of these values (or none).
NEUTRAL: dict[str, tuple[object, ...]] = {
    "audio": (),
    "beam_width": (1,),
    "best_of": (1,),
    "frequency_penalty": (0, 0.0),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1, 1.0),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0, 0.0),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0, 0.0),
    "prompt_logprobs": (False,),
    "repetition_penalty": (1, 1.0),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
    "web_search_options": (),
}
#: what a union of types means to the one who reads the error
_EXPECTED = {
    "prompt": "expected a string, a list of strings, a list of token ids, or a list of such lists",
    "stop": f"expected a string or a list of at most {STOP_STRINGS_MAX} strings, none empty",
    "content": "expected a string or a list of parts of type text",
}


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    include_usage: bool = False
    include_obfuscation: bool = False


class SamplingRequest(BaseModel):
    """What completions and chat have in common."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=CHOICES_MAX)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    stop: (
        Annotated[str, Field(max_length=STOP_STRING_CHARACTERS_MAX)]
        | Annotated[list[StopString], Field(max_length=STOP_STRINGS_MAX)]
        | None
    ) = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=CHOICES_MAX)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    # Said for the server's books, without effect on the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    request_id: str | None = None
    session_id: str | None = None
    priority: int | None = None

    audio: Any = None
    beam_width: Any = None
    best_of: Any = None
    frequency_penalty: Any = None
    function_call: Any = None
    functions: Any = None
    length_penalty: Any = None
    logit_bias: Any = None
    logprobs: Any = None
    min_p: Any = None
    modalities: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None
    presence_penalty: Any = None
    prompt_logprobs: Any = None
    repetition_penalty: Any = None
    response_format: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    suffix: Any = None
    tool_choice: Any = None
    tools: Any = None
    top_logprobs: Any = None
    use_beam_search: Any = None
    web_search_options: Any = None

    def check(self) -> Self:
        """Refuse what is declared but not served, and fields that contradict each other.

        Raises:
            InvalidRequest: Names the parameter.
        """
        for name, neutral in NEUTRAL.items():
            value = getattr(self, name)
            # 0 == False, but a count of 0 is not the same as "no".
            if value is not None and not any(
                type(value) is type(good) and value == good for good in neutral
            ):
                raise InvalidRequest(problem=f"{name} is not supported", param=name)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                problem="stream_options is only allowed with stream: true", param="stream_options"
            )
        return self

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        if isinstance(self.stop, str):
            return [self.stop] if self.stop else []
        return list(self.stop or ())

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(SamplingRequest):
    """Body of /v1/completions."""

    #: OpenAI's own default; chat has none
    default_max_tokens: ClassVar[int] = 16

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    echo: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids.

        Raises:
            InvalidRequest: There is none.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise InvalidRequest(problem="prompt is empty", param="prompt")
        found: list[str | list[int]] = []
        tokens: list[int] = []
        for item in prompt:
            if isinstance(item, int):
                tokens.append(item)
            else:
                found.append(item)
        return [tokens] if tokens else found


class TextPart(BaseModel):
    """One part of a message's content."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Annotated[str, Field(pattern="^text$")]
    text: str


class ChatMessage(BaseModel):
    """One message of a conversation; fields of tool calls go to the template as they are."""

    model_config = ConfigDict(extra="allow", frozen=True)

    role: Annotated[str, Field(pattern="^(system|developer|user|assistant|tool|function)$")]
    content: str | list[TextPart] | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as templates expect it: content is one string."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        # Templates were written before "developer" took the place of "system".
        role = "system" if self.role == "developer" else self.role
        return {**(self.model_extra or {}), "role": role, "content": content}


class ChatRequest(SamplingRequest):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> Self:
        """Refuse what is not served, see `SamplingRequest.check`."""
        if self.max_tokens is not None and self.max_completion_tokens not in (
            None,
            self.max_tokens,
        ):
            raise InvalidRequest(
                problem="max_tokens and max_completion_tokens contradict each other",
                param="max_tokens",
            )
        return super().check()


Query = TypeVar("Query", bound=SamplingRequest)


def parse(kind: type[Query], body: bytes) -> Query:
    """Read and check the body of a request.

    Raises:
        InvalidRequest: Names the first parameter that is wrong.
    """
    try:
        return kind.model_validate_json(body, strict=True).check()
    except ValidationError as error:
        raise _invalid(error) from None


def _invalid(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    message, place = first["msg"], first["loc"]
    if first["type"] == "json_invalid":
        return InvalidRequest(problem=f"the body is not valid JSON: {message}")
    if not place:
        return InvalidRequest(problem=f"the body is not a JSON object: {message}")
    # Behind a field with a union of types, pydantic names the alternatives it tried.
    for depth, name in enumerate(place):
        if name in _EXPECTED and depth + 1 < len(place):
            param = _dotted(place[: depth + 1])
            return InvalidRequest(problem=f"{param}: {_EXPECTED[str(name)]}", param=param)
    param = _dotted(place)
    if first["type"] == "extra_forbidden":
        return InvalidRequest(problem=f"unrecognized parameter {param}", param=param)
    return InvalidRequest(problem=f"{param}: {message}", param=param)


def _dotted(place: tuple[int | str, ...]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`."""
    text = ""
    for name in place:
        text += f"[{name}]" if isinstance(name, int) else f".{name}" if text else name
    return text
