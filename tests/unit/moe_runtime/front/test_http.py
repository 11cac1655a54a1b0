"""A real server, the real `openai` client, fake workers behind the real link, and their deaths."""

from __future__ import annotations

import asyncio
import contextlib
import secrets

import httpx
import openai
import pytest

from moe_runtime.front import HttpServer
from moe_runtime.messages import Drain, Goodbye, Stop
from tests.support.front import FakeWorker, cluster, wait_for


@contextlib.asynccontextmanager
async def serving(directory, **settings):
    async with cluster(directory, http=True, **settings) as running:
        url = running.url + "/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield running, client
        await running.check_nothing_is_left()


async def text_of(stream):
    return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])


def test_async_client(tmp_path):
    async def main():
        async with serving(tmp_path) as (running, client):
            whole = await client.completions.create(
                model="tiny", prompt="one", seed=1, max_tokens=20
            )
            assert whole.choices[0].text == running.script.text("one", 1, 20)
            stream = await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "one"}],
                seed=1,
                max_tokens=20,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            assert chunks[0].choices[0].delta.role == "assistant"
            assert chunks[-2].choices[0].finish_reason == "length"
            assert chunks[-1].usage.completion_tokens == 20
            assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 0
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            prompt = "<|turn|>user\none<|end|>\n<|turn|>assistant\n"
            assert text == running.script.text(prompt, 1, 20)
            assert [model.id async for model in client.models.list()] == ["tiny"]

    asyncio.run(main())


def test_sync_client(tmp_path):
    def ask(url):
        with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(
                model="tiny", prompt="one", seed=2, max_tokens=30, stream=True
            )
            return "".join(chunk.choices[0].text for chunk in stream)

    async def main():
        async with serving(tmp_path) as (running, _):
            text = await asyncio.to_thread(ask, running.url)
            assert text == running.script.text("one", 2, 30)

    asyncio.run(main())


def test_errors_as_the_client_sees_them(tmp_path):
    async def main():
        async with serving(tmp_path, max_open_requests=1) as (running, client):
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                await client.completions.create(model="gpt", prompt="x")
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(model="tiny", prompt="x", logprobs=2)
            assert caught.value.param == "logprobs"
            with pytest.raises(openai.BadRequestError, match="at most 1"):
                await client.completions.create(model="tiny", prompt="x", n=2)
            running.workers[0].token_delay_s = 0.05
            stream = await client.completions.create(model="tiny", prompt="x", stream=True)
            with pytest.raises(openai.RateLimitError):
                await client.completions.create(model="tiny", prompt="x")
            await stream.close()
            await running.check_nothing_is_left()
            running.workers[0].error = "broken"
            stream = await client.completions.create(model="tiny", prompt="x", stream=True)
            with pytest.raises(openai.APIError, match="broken"):
                await text_of(stream)
            running.front.relay.draining = True
            with pytest.raises(openai.InternalServerError) as refused:
                await client.completions.create(model="tiny", prompt="x")
            assert refused.value.status_code == 503

    asyncio.run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_everything(tmp_path, stream):
    async def main():
        async with serving(tmp_path) as (running, _):
            worker = running.workers[0]
            worker.token_delay_s = 0.02
            body = {"prompt": ["one", "two"], "max_tokens": 400, "stream": stream}
            async with httpx.AsyncClient(base_url=running.url) as client:
                request = asyncio.create_task(client.post("/v1/completions", json=body))
                await wait_for(lambda: len(worker.work) == 2)
                await asyncio.sleep(0.05)
                request.cancel()
                await asyncio.gather(request, return_exceptions=True)
            await running.check_nothing_is_left()
            assert len(worker.cancels) == 2
            assert running.front.relay.journal.counts["cancelled"] == 2

    asyncio.run(main())


@pytest.mark.parametrize("seed", [secrets.randbits(40)])
def test_a_stream_goes_on_at_another_worker(tmp_path, seed):
    """The worker of a stream dies, then the next one too; the text is the undisturbed one."""

    async def main():
        async with serving(tmp_path, workers=3) as (running, client):
            for worker in running.workers:
                worker.token_delay_s = 0.01
            streams = [
                await client.completions.create(
                    model="tiny", prompt=f"one {i}", seed=seed + i, max_tokens=150, stream=True
                )
                for i in range(6)
            ]
            texts = [asyncio.create_task(text_of(stream)) for stream in streams]
            journal = running.front.relay.journal
            for _ in range(2):
                tokens = sum(len(e.generated) for e in journal._entries.values())
                owned = journal.owned()
                victim = max(running.workers, key=lambda worker: owned[worker.incarnation])
                assert victim.work
                await asyncio.sleep(0.2)
                await running.kill(victim)
                await wait_for(
                    lambda seen=tokens: (
                        sum(len(e.generated) for e in journal._entries.values()) > seen
                    )
                )
            expected = [running.script.text(f"one {i}", seed + i, 150) for i in range(6)]
            assert [await text for text in texts] == expected
            assert journal.counts["requeued"] >= 2
            resumed = [submit for submit in running.workers[0].submits if submit.output_ids]
            assert resumed, "nothing was resumed in mid-stream"
            async with httpx.AsyncClient(base_url=running.url) as plain:
                status = (await plain.get("/status")).json()
            assert status["epoch"] == 5
            assert len(status["members"]) == 1

    asyncio.run(main())


def test_requests_wait_while_there_is_no_worker(tmp_path):
    async def main():
        async with serving(tmp_path) as (running, client):
            running.workers[0].token_delay_s = 0.01
            early = await client.completions.create(
                model="tiny", prompt="one", seed=1, max_tokens=60, stream=True
            )
            text = asyncio.create_task(text_of(early))
            await asyncio.sleep(0.1)
            (only,) = running.workers
            await only.say_goodbye()
            await wait_for(lambda: len(running.front.relay.journal.queued()) == 1)
            await running.kill(only)
            late = asyncio.create_task(
                client.completions.create(model="tiny", prompt="two", seed=1, max_tokens=10)
            )
            await wait_for(lambda: len(running.front.relay.journal.queued()) == 2)
            await running.add_worker()
            assert await text == running.script.text("one", 1, 60)
            assert (await late).choices[0].text == running.script.text("two", 1, 10)

    asyncio.run(main())


def test_a_zombie_is_not_heard(tmp_path):
    """The view drops a worker that is alive and goes on sending."""

    async def main():
        async with serving(tmp_path, workers=2) as (running, client):
            for worker in running.workers:
                worker.token_delay_s = 0.01
            stream = await client.completions.create(
                model="tiny", prompt="one", seed=4, max_tokens=100, stream=True
            )
            text = asyncio.create_task(text_of(stream))
            await wait_for(lambda: any(worker.work for worker in running.workers))
            zombie = next(worker for worker in running.workers if worker.work)
            await asyncio.sleep(0.1)
            running.workers.remove(zombie)
            await running.commit(running.workers)
            assert await text == running.script.text("one", 4, 100)
            assert running.front.relay.journal.counts["stray_items"] > 0
            await zombie.die()

    asyncio.run(main())


def test_a_worker_that_is_not_connected_is_passed_over(tmp_path):
    """A view still names a dead worker: its requests go elsewhere at once."""

    async def main():
        async with serving(tmp_path, workers=2) as (running, client):
            dead = running.workers.pop(0)
            await dead.die()
            await asyncio.sleep(0.1)
            for number in range(4):
                answer = await client.completions.create(
                    model="tiny", prompt="one", seed=number, max_tokens=5
                )
                assert answer.choices[0].text == running.script.text("one", number, 5)

    asyncio.run(main())


def test_a_worker_without_the_secret_is_not_heard(tmp_path):
    async def main():
        async with serving(tmp_path) as (running, client):
            stranger = FakeWorker(running.front, running.script, rank=1)
            await stranger.start(secret=b"another secret, of somebody else")
            running.workers[0].token_delay_s = 0.02
            answer = await client.completions.create(
                model="tiny", prompt="one", seed=1, max_tokens=20
            )
            assert answer.choices[0].text == running.script.text("one", 1, 20)
            assert stranger.incarnation not in running.front.relay.router.workers
            await stranger.die()

    asyncio.run(main())


def test_a_worker_cannot_speak_for_another(tmp_path):
    async def main():
        async with serving(tmp_path, workers=2) as (running, _):
            first, second = running.workers
            await first.send(Goodbye(incarnation=second.incarnation))
            await wait_for(lambda: running.front._link.num_invalid == 1)
            assert len(running.front.relay.router.routable()) == 2

    asyncio.run(main())


def test_the_front_stops_and_drains_workers(tmp_path):
    async def main():
        async with serving(tmp_path, workers=2) as (running, _):
            first, second = running.workers
            running.front.drain_worker(first.incarnation)
            running.front.stop_workers()
            await wait_for(lambda: first.received == [Drain(), Stop()])
            await wait_for(lambda: second.received == [Stop()])

    asyncio.run(main())


def test_a_port_that_is_taken_is_an_os_error(tmp_path):
    async def main():
        async with serving(tmp_path) as (running, _):
            port = int(running.url.rpartition(":")[2])
            with pytest.raises(OSError, match="in use"):
                await HttpServer(running.front.app, host="127.0.0.1", port=port).start()

    asyncio.run(main())
