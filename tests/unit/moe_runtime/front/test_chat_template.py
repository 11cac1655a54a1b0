from __future__ import annotations

import asyncio
import json

import pytest
from transformers import PreTrainedTokenizerFast

from moe_runtime.front.chat_template import ChatTemplate, load_chat_template
from moe_runtime.front.errors import TemplateFailed, TokenizerNotLoaded
from moe_runtime.front.tokenizer import Tokenizer
from tests.support.tokenizer import BOS, CHAT_TEMPLATE, EOS, build_tokenizer, write_tokenizer

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  Grüße <b>&</b> 日本 "},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "one"},
]
TEMPLATES = {
    "house": CHAT_TEMPLATE,
    "specials": "{{ bos_token }}{% for m in messages %}\n  [{{ m['content'] }}]\n{% endfor %}"
    "{{ eos_token }}{% if tools %}tools{% endif %}",
    "controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{{ m | tojson }}{{ m | tojson(indent=2) }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}{{ strftime_now('%Y') }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages if m.role == 'user' %}"
    "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}\n    {% if true %}\n  x\n    {% endif %}\n",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers_does(name):
    source = TEMPLATES[name]
    reference = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(), bos_token=BOS, eos_token=EOS, chat_template=source
    )
    expected = reference.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    ours = ChatTemplate(source, {"bos_token": BOS, "eos_token": EOS})
    assert ours.render(MESSAGES) == expected


def test_options_reach_the_template():
    template = ChatTemplate(CHAT_TEMPLATE, {})
    assert template.render(MESSAGES, options={"enable_thinking": False}).endswith("thoughts)\n")
    assert template.render(MESSAGES).endswith("assistant\n")


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('alternate, please') }}",
        "{{ messages[99].content }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ ().__class__.__bases__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{% for a in range(10000000) %}{% endfor %}",
    ],
)
def test_what_a_template_may_not_do_is_a_typed_error(source):
    with pytest.raises(TemplateFailed):
        ChatTemplate(source, {}).render(MESSAGES)


def test_files(tmp_path):
    assert load_chat_template(tmp_path, {}) is None
    named = {
        "chat_template": [
            {"name": "tool_use", "template": "t"},
            {"name": "default", "template": "d"},
        ]
    }
    template = load_chat_template(tmp_path, named)
    assert template is not None
    assert template.render([]) == "d"
    (tmp_path / "chat_template.jinja").write_text("from file")
    template = load_chat_template(tmp_path, named)
    assert template is not None
    assert template.render([]) == "from file"
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(TokenizerNotLoaded, match="chat template"):
        load_chat_template(tmp_path, {})


def test_tokenizer_of_a_checkpoint(tmp_path):
    with pytest.raises(TokenizerNotLoaded, match="no such file"):
        Tokenizer.load(tmp_path)
    reference = write_tokenizer(tmp_path, vocab_size=400)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == 400
    long_text = "one two three " * 1000
    for text in ("one", long_text):
        assert asyncio.run(tokenizer.encode(text)) == reference.encode(text).ids
    ids = asyncio.run(tokenizer.encode_chat(MESSAGES))
    assert reference.decode(ids, skip_special_tokens=False).startswith("<|turn|>system\nBe brief.")
    assert ids.count(reference.token_to_id("<|turn|>")) == 5
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerNotLoaded):
        Tokenizer.load(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps([1]))
    with pytest.raises(TokenizerNotLoaded, match="not a JSON object"):
        Tokenizer.load(tmp_path)


def test_a_model_without_template_refuses_chat(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(TemplateFailed, match="completions"):
        asyncio.run(Tokenizer.load(tmp_path).encode_chat(MESSAGES))
