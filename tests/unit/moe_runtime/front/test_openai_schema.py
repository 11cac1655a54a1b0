from __future__ import annotations

import json

import pytest

from moe_runtime.front.errors import InvalidRequest
from moe_runtime.front.openai_schema import NEUTRAL, ChatRequest, CompletionRequest, parse

USER = [{"role": "user", "content": "hi"}]


def completion(**fields):
    return parse(CompletionRequest, json.dumps({"prompt": "x", **fields}).encode())


def chat(**fields):
    return parse(ChatRequest, json.dumps({"messages": USER, **fields}).encode())


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("x", ["x"]),
        ("", [""]),
        (["x", "y"], ["x", "y"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_every_form_of_prompt(prompt, prompts):
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", [None, 5, {}, ["x", 1], [1.5], [True], [[["x"]]], [-1]])
def test_wrong_prompts_name_the_parameter(prompt):
    with pytest.raises(InvalidRequest, match="expected a string") as caught:
        completion(prompt=prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("max_tokens", 1.5),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("n", 0),
        ("n", 10_000),
        ("seed", 2**63),
        ("seed", 1.5),
        ("stop", 5),
        ("stop", ["a", ""]),
        ("stop", ["a"] * 17),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [-1]),
        ("min_tokens", -1),
        ("ignore_eos", "yes"),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("unheard_of", 1),
        ("logprobs", 0),
        ("logprobs", 5),
        ("suffix", "x"),
        ("best_of", 2),
        ("logit_bias", {"5": 1}),
        ("presence_penalty", 0.5),
        ("response_format", {"type": "json_object"}),
        ("tools", [{"type": "function"}]),
    ],
)
def test_wrong_and_unserved_parameters_are_named(field, value):
    for make in (completion, chat):
        with pytest.raises(InvalidRequest) as caught:
            make(**{field: value})
        assert caught.value.param.startswith(field)
        assert field in str(caught.value)


@pytest.mark.parametrize("name", NEUTRAL)
def test_neutral_values_pass(name):
    for value in (None, *NEUTRAL[name]):
        completion(**{name: value})


def test_infinity_is_no_temperature():
    for text in ("NaN", "Infinity", "1e999"):
        with pytest.raises(InvalidRequest):
            parse(CompletionRequest, b'{"prompt": "x", "temperature": %s}' % text.encode())


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b"\xff", b'{"prompt": "x"', b"null"])
def test_bodies_that_are_no_json_object(body):
    with pytest.raises(InvalidRequest, match="JSON"):
        parse(CompletionRequest, body)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "king", "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        (
            [*USER, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[1].content",
        ),
    ],
)
def test_wrong_messages_are_named(messages, param):
    with pytest.raises(InvalidRequest) as caught:
        chat(messages=messages)
    assert caught.value.param == param


def test_parts_of_text_become_one_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    query = chat(messages=[{"role": "developer", "content": parts, "name": "n"}])
    assert query.messages[0].for_template() == {"role": "system", "content": "a\nb", "name": "n"}
    query = chat(messages=[{"role": "assistant", "content": None, "tool_calls": [1]}])
    assert query.messages[0].for_template()["content"] == ""


def test_the_two_budgets_of_chat():
    assert chat(max_tokens=5, max_completion_tokens=5).max_completion_tokens == 5
    with pytest.raises(InvalidRequest, match="contradict"):
        chat(max_tokens=5, max_completion_tokens=6)


def test_stop_as_a_list():
    assert completion(stop="a").stop_strings == ["a"]
    assert completion(stop="").stop_strings == []
    assert completion(stop=["a", "b"]).stop_strings == ["a", "b"]
    assert completion(stream=True, stream_options={"include_usage": True}).include_usage
