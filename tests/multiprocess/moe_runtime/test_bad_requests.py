"""Bad requests to a real cluster: the OpenAI error, and nothing left open."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.cluster import (
    VOCABULARY,
    cluster_config,
    copies,
    random_prompts,
    run_all,
    served_checkpoint,
    status,
    streams,
    wait_for,
)
from tests.support.serving import ClusterForTests, running_cluster

CONTEXT_TOKENS = 200
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD: dict[str, Any] = {"prompt": "In the beginning", "max_tokens": 4}
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}

#: path, what is wrong with a good body, status, the parameter that is blamed
REFUSED: list[tuple[str, dict[str, Any], int, str | None]] = [
    (COMPLETIONS, {"prompt": [17] * (CONTEXT_TOKENS + 1)}, 400, "prompt"),
    (COMPLETIONS, {"prompt": "the quick brown fox " * 400}, 400, "prompt"),
    (COMPLETIONS, {"max_tokens": CONTEXT_TOKENS}, 400, "max_tokens"),
    (COMPLETIONS, {"model": "another"}, 404, "model"),
    (COMPLETIONS, {"model": 7}, 400, "model"),
    (COMPLETIONS, {"prompt": None}, 400, "prompt"),
    (COMPLETIONS, {"prompt": ""}, 400, "prompt"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [VOCABULARY]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": {"text": "x"}}, 400, "prompt"),
    (COMPLETIONS, {"max_tokens": 0}, 400, "max_tokens"),
    (COMPLETIONS, {"max_tokens": "4"}, 400, "max_tokens"),
    (COMPLETIONS, {"max_tokens": 1.5}, 400, "max_tokens"),
    (COMPLETIONS, {"temperature": -1}, 400, "temperature"),
    (COMPLETIONS, {"temperature": "hot"}, 400, "temperature"),
    (COMPLETIONS, {"top_p": 0}, 400, "top_p"),
    (COMPLETIONS, {"seed": 2**63}, 400, "seed"),
    (COMPLETIONS, {"n": 0}, 400, "n"),
    (COMPLETIONS, {"n": 65, "max_tokens": 1}, 400, "n"),
    (COMPLETIONS, {"stop": [""]}, 400, "stop"),
    (COMPLETIONS, {"stream": "yes"}, 400, "stream"),
    (COMPLETIONS, {"stream_options": {"include_usage": True}}, 400, "stream_options"),
    (COMPLETIONS, {"logprobs": 3}, 400, "logprobs"),
    (COMPLETIONS, {"best_of": 2}, 400, "best_of"),
    (COMPLETIONS, {"presence_penalty": 0.5}, 400, "presence_penalty"),
    (COMPLETIONS, {"logit_bias": {"5": 1}}, 400, "logit_bias"),
    (COMPLETIONS, {"no_such_parameter": 1}, 400, "no_such_parameter"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": "Hello"}, 400, "messages"),
    (CHAT, {"messages": [{"role": "nobody", "content": "x"}]}, 400, "messages[0].role"),
    (CHAT, {"messages": [{"content": "x"}]}, 400, "messages[0].role"),
    (CHAT, {"tools": [{"type": "function"}]}, 400, "tools"),
    (CHAT, {"response_format": {"type": "json_object"}}, 400, "response_format"),
    (CHAT, {"max_completion_tokens": 5}, 400, "max_tokens"),
]
BAD_BODIES = [b"", b"{", b"[1, 2]", b'"prompt"', b"\xff\xfe", b'{"prompt": "x"}}', b"null", b"NaN"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterForTests]:
    seed = random.SystemRandom().randrange(1 << 30)
    checkpoint = served_checkpoint(tmp_path_factory.mktemp(f"checkpoint-{seed}"), seed=seed)
    config = cluster_config(
        checkpoint,
        cluster={"workers": 2},
        scheduler={"num_pages": 64, "max_context_tokens": CONTEXT_TOKENS},
        front={"max_open_requests": 64},
    )
    with running_cluster(config) as running:
        yield running


def check_error(response: httpx.Response, code: int, param: str | None) -> None:
    assert response.status_code == code, response.text
    assert response.headers["content-type"] == "application/json"
    (kind,) = response.json()
    assert kind == "error"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert "Traceback" not in error["message"]
    assert error["type"] in ("invalid_request_error", "not_found_error")
    assert error["param"] == param, error


def test_each_is_refused_by_name_and_streams_beside_them_do_not_notice(
    cluster: ClusterForTests,
) -> None:
    async def ask() -> None:
        client = cluster.client
        seed = random.SystemRandom().randrange(1 << 30)
        prompts = random_prompts(random.Random(seed), 4)
        wanted = streams(cluster.model, prompts, max_tokens=100, seed=seed)
        undisturbed = await run_all(client, copies(wanted))
        before = (await cluster.until_everything_is_back())["journal"]
        beside = asyncio.create_task(run_all(client, copies(wanted)))
        for path, wrong, code, param in REFUSED:
            body = (GOOD if path == COMPLETIONS else TALK) | wrong
            check_error(await client.post(path, json=body), code, param)
        for path in (COMPLETIONS, CHAT):
            for content in BAD_BODIES:
                check_error(await client.post(path, content=content), 400, None)
        missing = await client.get("/v1/models/another")
        check_error(missing, 404, "model")
        for response in (await client.get("/v1/nothing"), await client.get(COMPLETIONS)):
            assert response.status_code in (404, 405)
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert await beside == undisturbed, f"seed {seed}"
        after = (await cluster.until_everything_is_back())["journal"]
        # Nothing that was refused has ever been a request.
        assert after["accepted"] - before["accepted"] == len(wanted)
        assert (await cluster.post(COMPLETIONS, **GOOD))["choices"]
        assert (await cluster.post(CHAT, **TALK))["choices"]

    cluster.run(ask())


def test_too_many_at_once_are_refused_with_429(cluster: ClusterForTests) -> None:
    async def ask() -> None:
        body = {"prompt": [5, 6, 7], "max_tokens": 150, "ignore_eos": True, "n": 40}
        refused = None
        while refused is None:  # if one was over before the other came, they were not too many
            answers = await asyncio.gather(
                *(cluster.client.post(COMPLETIONS, json=body) for _ in range(2))
            )
            assert any(answer.status_code == 200 for answer in answers)
            refused = next((a for a in answers if a.status_code != 200), None)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert set(refused.json()["error"]) == {"message", "type", "param", "code"}
        await cluster.until_everything_is_back()

    cluster.run(ask())


def test_connections_cut_anywhere_leave_nothing_open(cluster: ClusterForTests) -> None:
    body = {"prompt": [9, 8, 7], "max_tokens": 150, "ignore_eos": True}

    async def cut(sent: bytes, received: int) -> None:
        where = urlsplit(str(cluster.client.base_url))
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        writer.write(sent)
        await writer.drain()
        if received:
            await reader.readexactly(received)
        writer.transport.abort()  # a reset, not a polite end

    def request(stream: bool) -> bytes:
        content = json.dumps(body | {"stream": stream}).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        return head.encode() + content

    async def ask() -> None:
        await cluster.until_everything_is_back()
        rng = random.Random(random.SystemRandom().randrange(1 << 30))
        streamed, whole = request(stream=True), request(stream=False)
        halves = [streamed[: rng.randrange(1, len(streamed))] for _ in range(8)]
        await asyncio.gather(
            *(cut(half, 0) for half in halves),
            *(cut(streamed, rng.randrange(1, 3000)) for _ in range(8)),
        )
        waiting = [asyncio.create_task(cluster.client.post(COMPLETIONS, json=body | {"n": 2}))]
        await wait_for(cluster.client, lambda answer: answer["open_requests"] >= 2, "it is open")
        await cut(whole, 0)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await cluster.until_everything_is_back()
        assert (await status(cluster.client))["healthy"]

    cluster.run(ask())
