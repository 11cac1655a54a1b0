"""The HTTP interface over ASGI, with one fake worker behind the real link."""

from __future__ import annotations

import asyncio
import contextlib
import json

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from moe_runtime import __version__
from tests.support.front import CONTEXT_TOKENS, cluster, wait_for


@contextlib.asynccontextmanager
async def serving(directory, **settings):
    async with cluster(directory, **settings) as running:
        transport = httpx.ASGITransport(app=running.front.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            yield running, client
        await running.check_nothing_is_left()


async def post(client, path="/v1/completions", **body):
    return await client.post(path, json=body)


def events(response):
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_completions_whole_and_streamed(tmp_path):
    async def main():
        async with serving(tmp_path) as (running, client):
            expected = running.script.text("one two", 5, 40)
            running.workers[0].cached_tokens = 1
            body = {"prompt": "one two", "seed": 5, "max_tokens": 40, "return_token_ids": True}
            whole = (await post(client, model="tiny", **body)).json()
            assert whole["object"] == "text_completion"
            (choice,) = whole["choices"]
            assert choice["text"] == expected
            assert choice["finish_reason"] == "length"
            ids = running.script.tokenizer.encode("one two").ids
            assert choice["token_ids"] == running.script.ids(ids, 5, 40)
            assert whole["usage"] == {
                "prompt_tokens": len(ids),
                "completion_tokens": 40,
                "total_tokens": len(ids) + 40,
                "prompt_tokens_details": {"cached_tokens": 1},
            }
            options = {"include_usage": True}
            response = await post(client, stream=True, stream_options=options, **body)
            *chunks, usage = events(response)
            assert usage["choices"] == []
            assert usage["usage"] == whole["usage"]
            assert {chunk["id"] for chunk in chunks} == {usage["id"]}
            assert all(chunk["usage"] is None for chunk in chunks)
            choices = [chunk["choices"][0] for chunk in chunks]
            assert "".join(c["text"] for c in choices) == expected
            assert [t for c in choices for t in c["token_ids"]] == choice["token_ids"]
            assert [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
            assert choices[-1]["finish_reason"] == "length"

    asyncio.run(main())


def test_a_line_of_a_stream_is_one_line_to_every_client(tmp_path):
    prompt = "a\x0bb\x0cc\x1cd\x1de\x1ef\x85g\u2028h\u2029i\r\nj"

    async def main():
        async with serving(tmp_path) as (_, client):
            body = {"prompt": prompt, "echo": True, "stream": True, "max_tokens": 3, "seed": 1}
            response = await post(client, **body)
            assert [line for line in response.text.splitlines() if line] == [
                line for line in response.text.split("\n") if line
            ]
            texts = [event["choices"][0]["text"] for event in events(response)]
            assert "".join(texts).startswith(prompt)

    asyncio.run(main())


def test_chat_streams_the_role_first(tmp_path):
    async def main():
        async with serving(tmp_path) as (running, client):
            body = {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "one"}]}],
                "seed": 1,
                "max_completion_tokens": 12,
            }
            prompt = "<|turn|>user\none<|end|>\n<|turn|>assistant\n"
            expected = running.script.text(prompt, 1, 12)
            whole = (await post(client, "/v1/chat/completions", **body)).json()
            assert whole["object"] == "chat.completion"
            assert whole["choices"][0]["message"] == {
                "role": "assistant",
                "content": expected,
                "refusal": None,
            }
            response = await post(client, "/v1/chat/completions", stream=True, **body)
            chunks = events(response)
            assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
            assert "usage" not in chunks[0]
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            assert deltas[0] == {"role": "assistant", "content": ""}
            assert deltas[-1] == {}
            assert "".join(delta.get("content", "") for delta in deltas) == expected

    asyncio.run(main())


def test_several_prompts_choices_and_echo(tmp_path):
    async def main():
        async with serving(tmp_path, workers=2) as (running, client):
            body = {"prompt": ["one", "two three"], "n": 2, "seed": 7, "max_tokens": 9}
            whole = (await post(client, echo=True, **body)).json()
            expected = [
                prompt + running.script.text(prompt, 7 + number, 9)
                for prompt in body["prompt"]
                for number in range(2)
            ]
            assert [c["text"] for c in whole["choices"]] == expected
            assert [c["index"] for c in whole["choices"]] == [0, 1, 2, 3]
            encode = running.script.tokenizer.encode
            assert whole["usage"]["prompt_tokens"] == sum(
                len(encode(p).ids) for p in body["prompt"]
            )
            assert whole["usage"]["completion_tokens"] == 36
            texts = [""] * 4
            for chunk in events(await post(client, echo=True, stream=True, **body)):
                for choice in chunk["choices"]:
                    texts[choice["index"]] += choice["text"]
            assert texts == expected
            assert all(worker.submits for worker in running.workers)
            ids = encode("two three").ids
            for prompt in (ids, [ids]):
                answer = (await post(client, prompt=prompt, seed=8, max_tokens=9)).json()
                assert answer["choices"][0]["text"] == running.script.text(ids, 8, 9)

    asyncio.run(main())


def test_stop_strings_end_the_work_too(tmp_path):
    async def main():
        async with serving(tmp_path) as (running, client):
            worker = running.workers[0]
            worker.token_delay_s = 0.002
            text = running.script.text("one", 3, 400)
            stop = text[40:46]
            expected = text[: text.index(stop)]
            body = {"prompt": "one", "seed": 3, "max_tokens": 400, "stop": ["@@@", stop]}
            whole = (await post(client, **body)).json()
            assert whole["choices"][0]["text"] == expected
            assert whole["choices"][0]["finish_reason"] == "stop"
            assert whole["usage"]["completion_tokens"] < 100
            await wait_for(lambda: worker.cancels)
            chunks = events(await post(client, stream=True, **body))
            assert "".join(c["choices"][0]["text"] for c in chunks) == expected
            included = (await post(client, include_stop_str_in_output=True, **body)).json()
            assert included["choices"][0]["text"] == expected + stop
            longer = (await post(client, min_tokens=380, **body)).json()
            assert longer["usage"]["completion_tokens"] >= 380
            assert running.front.relay.journal.counts["finished"] == 4

    asyncio.run(main())


def test_the_stop_token_has_no_text_but_counts(tmp_path):
    async def main():
        async with serving(tmp_path) as (running, client):
            running.workers[0].stop_after = 4
            body = {"prompt": "one", "seed": 3, "max_tokens": 20, "stop_token_ids": [9]}
            whole = (await post(client, top_k=-1, temperature=0.5, ignore_eos=True, **body)).json()
            assert whole["choices"][0]["finish_reason"] == "stop"
            assert whole["usage"]["completion_tokens"] == 5
            submit = running.workers[0].submits[0]
            assert (submit.stop_token_ids, submit.top_k, submit.ignore_eos) == ([9], 0, True)
            assert (submit.temperature, submit.seed, submit.max_tokens) == (0.5, 3, 20)

    asyncio.run(main())


def test_a_seed_is_drawn_when_there_is_none(tmp_path):
    async def main():
        async with serving(tmp_path) as (running, client):
            for _ in range(2):
                await post(client, prompt="one", max_tokens=2)
            await post(client, prompt="one", max_tokens=2, seed=-1)
            seeds = [submit.seed for submit in running.workers[0].submits]
            assert len(set(seeds)) == 3
            assert seeds[2] == 2**63 - 1

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "content", "status", "param"),
    [
        ("/v1/completions", b"{", 400, None),
        ("/v1/completions", b'{"prompt": 5}', 400, "prompt"),
        ("/v1/completions", b'{"prompt": ""}', 400, "prompt"),
        ("/v1/completions", b'{"prompt": []}', 400, "prompt"),
        ("/v1/completions", b'{"prompt": [[]]}', 400, "prompt"),
        ("/v1/completions", b'{"prompt": [99999]}', 400, "prompt"),
        ("/v1/completions", b'{"prompt": "x", "logprobs": 1}', 400, "logprobs"),
        ("/v1/completions", b'{"prompt": "x", "suffix": "y"}', 400, "suffix"),
        ("/v1/completions", b'{"prompt": "x", "max_tokens": 512}', 400, "max_tokens"),
        ("/v1/completions", b'{"prompt": "x", "model": "gpt"}', 404, "model"),
        ("/v1/completions", b'{"prompt": ["x","x","x"], "n": 3}', 400, "n"),
        ("/v1/chat/completions", b'{"messages": []}', 400, "messages"),
        (
            "/v1/chat/completions",
            b'{"messages": [{"role": "function", "content": "x"}]}',
            400,
            "messages",
        ),
        ("/v1/unknown", b"{}", 404, None),
        ("/v1/models", b"{}", 405, None),
        ("/", b"{}", 404, None),
    ],
)
def test_errors_are_openai_error_objects(tmp_path, path, content, status, param):
    async def main():
        async with serving(tmp_path, max_open_requests=8) as (_, client):
            response = await client.post(path, content=content)
            assert response.status_code == status
            error = response.json()["error"]
            assert error["param"] == param
            assert set(error) == {"message", "type", "param", "code"}
            assert error["type"] == "invalid_request_error"
            assert "Traceback" not in response.text

    asyncio.run(main())


def test_too_long_prompts_and_bodies(tmp_path):
    async def main():
        async with serving(tmp_path) as (_, client):
            response = await post(client, prompt=[1] * CONTEXT_TOKENS, max_tokens=1)
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "context_length_exceeded"
            response = await client.post("/v1/completions", content=b" " * (17 << 20))
            assert response.status_code == 413

    asyncio.run(main())


def test_no_room_is_429_and_drain_is_503(tmp_path):
    async def main():
        async with serving(tmp_path, max_open_requests=2) as (running, client):
            running.workers[0].token_delay_s = 0.01
            body = {"prompt": "one", "max_tokens": 60}
            first = asyncio.create_task(post(client, n=2, **body))
            await wait_for(lambda: len(running.front.relay.journal) == 2)
            refused = await post(client, **body)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
            drained = asyncio.create_task(running.front.drain())
            await asyncio.sleep(0)
            refused = await post(client, **body)
            assert refused.status_code == 503
            assert "retry-after" in refused.headers
            assert (await client.get("/health")).status_code == 503
            assert (await client.get("/live")).status_code == 200
            assert (await first).status_code == 200
            assert await drained

    asyncio.run(main())


def test_drain_gives_up_at_its_deadline(tmp_path):
    async def main():
        async with cluster(tmp_path, workers=0) as running:
            transport = httpx.ASGITransport(app=running.front.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
                waiting = asyncio.create_task(post(client, prompt="one"))
                await wait_for(lambda: len(running.front.relay.journal))
                assert not await running.front.drain(0.05)
                response = await waiting
                assert response.status_code == 503
                assert "shutting down" in response.json()["error"]["message"]
                await running.check_nothing_is_left()

    asyncio.run(main())


def test_a_worker_error_and_an_expired_request(tmp_path):
    async def main():
        async with serving(tmp_path, request_timeout_s=8.0) as (running, client):
            worker = running.workers[0]
            worker.error = "out of pages"
            failed = await post(client, prompt="one")
            assert failed.status_code == 500
            assert "out of pages" in failed.json()["error"]["message"]
            chunks = events(await post(client, prompt="one", stream=True))
            assert chunks[-1]["error"]["code"] == "generation_failed"
            worker.error, worker.token_delay_s = None, 30.0
            late = await post(client, prompt="one")
            assert late.status_code == 504
            await wait_for(lambda: worker.cancels)

    asyncio.run(main())


def test_health_status_models_version(tmp_path):
    async def main():
        async with serving(tmp_path, workers=0) as (running, client):
            health = await client.get("/health")
            assert health.status_code == 503
            assert "no view" in health.json()["error"]["message"]
            first = await running.add_worker()
            second = await running.add_worker()
            await wait_for(lambda: running.front.relay.router.workers[second.incarnation].load)
            assert (await client.get("/health")).status_code == 200
            status = (await client.get("/status")).json()
            assert (status["epoch"], status["open_requests"], status["healthy"]) == (2, 0, True)
            assert [m["pid"] for m in status["members"]] == [10_000, 10_001]
            assert status["members"][1]["free_pages"] == 48
            await first.say_goodbye()
            await second.say_goodbye()
            await wait_for(lambda: not running.front.relay.router.routable())
            assert "no worker" in (await client.get("/health")).json()["error"]["message"]
            models = (await client.get("/v1/models")).json()["data"]
            assert [(m["id"], m["object"]) for m in models] == [("tiny", "model")]
            assert (await client.get("/v1/models/tiny")).json()["id"] == "tiny"
            assert (await client.get("/v1/models/a/b")).status_code == 404
            assert (await client.get("/version")).json() == {"version": __version__}

    asyncio.run(main())


def test_metrics(tmp_path):
    async def main():
        async with serving(tmp_path) as (running, client):
            running.workers[0].cached_tokens = 1
            for _ in range(3):
                await post(client, prompt="one two", max_tokens=8)
            await wait_for(
                lambda: running.front.relay.router.workers[running.workers[0].incarnation].load
            )
            response = await client.get("/metrics")
            families = {f.name: f for f in text_string_to_metric_families(response.text)}
            samples = {
                (s.name, s.labels.get("engine"), s.labels.get("finished_reason")): s.value
                for f in families.values()
                for s in f.samples
            }
            assert samples["vllm:generation_tokens_total", "front", None] == 24
            assert samples["vllm:request_success_total", "front", "length"] == 3
            assert samples["vllm:prefix_cache_hits_total", "front", None] == 3
            assert samples["vllm:time_to_first_token_seconds_count", "front", None] == 3
            assert samples["vllm:e2e_request_latency_seconds_count", "front", None] == 3
            assert samples["vllm:inter_token_latency_seconds_count", "front", None] > 3
            assert samples["vllm:kv_cache_usage_perc", "0", None] == 0.25
            assert samples["vllm:num_requests_waiting", "front", None] == 0
            assert samples["vllm:num_preemptions_total", None, None] == 2
            assert samples["moe_runtime_view_epoch", None, None] == 1
            assert samples["moe_runtime_journal_open", None, None] == 0

    asyncio.run(main())


def test_an_unforeseen_error_shows_no_traceback(tmp_path, monkeypatch):
    async def main():
        async with serving(tmp_path) as (running, client):
            monkeypatch.setattr(
                type(running.front.relay), "check_admission", lambda *_: 1 / 0, raising=True
            )
            response = await post(client, prompt="one")
            assert response.status_code == 500
            assert response.json()["error"]["message"] == "internal error"

    asyncio.run(main())
