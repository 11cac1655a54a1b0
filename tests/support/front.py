"""Fake workers that speak the real messages over the real link, and a front that serves them.

A fake worker's token at output position `i` is a pure function of prompt, seed and `i`, as with a
real one, so that a request that moves has only one possible continuation. Everything runs in the
test's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import zmq
import zmq.asyncio

from configs.schema import FrontConfig, ModelConfig, RuntimeConfig
from dispatch import ExpertMap
from elastic import Member, Role, View
from moe_runtime.front import Front, HttpServer
from moe_runtime.messages import (
    Cancel,
    Drain,
    Goodbye,
    Hello,
    Load,
    Stop,
    Submit,
    TokenItem,
    Tokens,
    ViewCommitted,
    WorkerMessage,
    decode_front_message,
    encode,
)
from tests.support.tokenizer import EOS, write_tokenizer
from transfer.control import secure_client

SECRET = b"the secret of the test cluster"
CONTEXT_TOKENS = 512
PARTS = ("In the", " beginning", " was", " naïve", " 日本", " 🙂🙂", " word", ",\n", " süß", ".")
DEADLINE_S = 60.0


class Script:
    """The tokens of fake workers."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = write_tokenizer(directory)
        self.parts = [self.tokenizer.encode(part).ids for part in PARTS]
        self.eos = self.tokenizer.token_to_id(EOS)

    def ids(self, prompt_ids: Sequence[int], seed: int, count: int) -> list[int]:
        """The first `count` output tokens: whole parts in an order drawn from prompt and seed."""
        ids: list[int] = []
        number = 0
        while len(ids) < count:
            key = f"{list(prompt_ids)} {seed} {number}".encode()
            ids += self.parts[hashlib.sha256(key).digest()[0] % len(self.parts)]
            number += 1
        return ids[:count]

    def text(self, prompt: str | Sequence[int], seed: int, count: int) -> str:
        """The text of `ids`, decoded in one go behind the prompt."""
        prompt_ids = self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else list(prompt)
        whole = self.tokenizer.decode(prompt_ids + self.ids(prompt_ids, seed, count))
        return whole[len(self.tokenizer.decode(prompt_ids)) :]


class FakeWorker:
    """One worker; `work` are the requests it computes at present."""

    def __init__(self, front: Front, script: Script, *, rank: int) -> None:
        self.rank = rank
        self.incarnation = secrets.token_hex(8)
        self.token_delay_s = 0.0
        self.max_item_tokens = 3
        self.cached_tokens = 0
        self.stop_after: int | None = None
        self.error: str | None = None
        self.submits: list[Submit] = []
        self.cancels: list[str] = []
        self.received: list[object] = []
        self.work: dict[str, asyncio.Task[None]] = {}
        self._front = front
        self._script = script
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, *, secret: bytes = SECRET) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        secure_client(self._socket, secret, identity=self.incarnation)
        self._socket.connect(f"tcp://{self._front.control_address}")
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._report())]
        await self.send(
            Hello(
                incarnation=self.incarnation,
                rank=self.rank,
                epoch=0,
                max_context_tokens=CONTEXT_TOKENS,
                kv_pages=64,
            )
        )

    async def die(self) -> None:
        """End without a word."""
        tasks = [*self._tasks, *self.work.values()]
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close(linger=0)
        self._context.term()
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def send(self, message: WorkerMessage) -> None:
        await self._socket.send(encode(message))

    async def commit(self, epoch: int, workers: Sequence[FakeWorker]) -> None:
        """Tell the front of a view."""
        view = make_view(epoch, workers)
        names = [worker.incarnation for worker in workers]
        await self.send(
            ViewCommitted(
                incarnation=self.incarnation, view=view.encode(), members=names, epoch=epoch
            )
        )

    async def say_goodbye(self) -> None:
        await self.send(Goodbye(incarnation=self.incarnation))

    async def _receive(self) -> None:
        while True:
            message = decode_front_message(await self._socket.recv())
            match message:
                case Submit():
                    self.submits.append(message)
                    self.work[message.request_id] = asyncio.create_task(self._generate(message))
                case Cancel():
                    self.cancels.append(message.request_id)
                    if task := self.work.pop(message.request_id, None):
                        task.cancel()
                case Drain() | Stop():
                    self.received.append(message)

    async def _report(self) -> None:
        while True:
            await self.send(
                Load(
                    incarnation=self.incarnation,
                    running=len(self.work),
                    waiting=0,
                    free_pages=48,
                    num_pages=64,
                    epoch=1,
                    counters={"passes": float(len(self.submits)), "preemptions": 2.0},
                )
            )
            await asyncio.sleep(0.1)

    async def _generate(self, submit: Submit) -> None:
        ids = self._script.ids(submit.prompt_ids, submit.seed, submit.max_tokens)
        assert submit.output_ids == ids[: len(submit.output_ids)]
        if self.stop_after is not None:
            ids[self.stop_after :] = [self._script.eos]
        index, size = len(submit.output_ids), 1
        while index < len(ids):
            await asyncio.sleep(self.token_delay_s)
            stop = min(index + size, len(ids))
            reason = None
            if stop == len(ids):
                reason = "length" if self.stop_after is None else "stop"
                self.work.pop(submit.request_id)
            item = TokenItem(
                request_id=submit.request_id,
                index=index,
                token_ids=ids[index:stop],
                finish_reason=reason if self.error is None else "error",
                cached_tokens=self.cached_tokens,
                error=self.error,
            )
            await self.send(Tokens(incarnation=self.incarnation, items=[item]))
            index, size = stop, size % self.max_item_tokens + 1
            if self.error is not None:
                self.work.pop(submit.request_id, None)
                return


def make_view(epoch: int, workers: Sequence[FakeWorker]) -> View:
    ranks = sorted(worker.rank for worker in workers)
    return View(
        epoch=epoch,
        members=tuple(
            Member(
                rank=worker.rank,
                incarnation=worker.incarnation,
                role=Role.BOTH,
                node="here",
                address="127.0.0.1:1",
                pid=10_000 + worker.rank,
            )
            for worker in sorted(workers, key=lambda worker: worker.rank)
        ),
        expert_map=ExpertMap.even(num_layers=1, num_logical=4, ranks=ranks),
    )


class Cluster:
    """A front, its fake workers and their script."""

    def __init__(self, front: Front, script: Script) -> None:
        self.front = front
        self.script = script
        self.workers: list[FakeWorker] = []
        self.epoch = 0
        self.url = ""

    async def add_worker(self) -> FakeWorker:
        """Start one and commit a view with it."""
        worker = FakeWorker(self.front, self.script, rank=len(self.workers))
        self.workers.append(worker)
        await worker.start()
        await self.commit(self.workers)
        await wait_for(lambda: worker.incarnation in self.front.relay.router.routable())
        return worker

    async def commit(self, workers: Sequence[FakeWorker]) -> None:
        self.epoch += 1
        await workers[0].commit(self.epoch, workers)

    async def kill(self, worker: FakeWorker) -> None:
        """Let one die; a survivor sees the next view committed."""
        self.workers.remove(worker)
        await worker.die()
        if self.workers:
            await self.commit(self.workers)

    async def check_nothing_is_left(self) -> None:
        """Conservation: no open request here, no work there."""
        await wait_for(lambda: not len(self.front.relay.journal))
        await wait_for(lambda: not any(worker.work for worker in self.workers))
        self.front.relay.journal.check_invariants()
        assert not self.front.relay._generations


async def wait_for(condition) -> None:
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "condition did not come true"
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def cluster(
    directory: Path, *, workers: int = 1, http: bool = False, **settings: object
) -> AsyncIterator[Cluster]:
    """A running front with workers; with `http` also a listening server at `url`."""
    script = Script(directory)
    config = RuntimeConfig(
        model=ModelConfig(path=directory, served_name="tiny"),
        front=FrontConfig.model_validate({"port": 0, **settings}),
    )
    front = Front(config, secret=SECRET)
    await front.start()
    running = Cluster(front, script)
    server = HttpServer(front.app, host="127.0.0.1", port=0)
    try:
        if http:
            await server.start()
            running.url = server.url
        for _ in range(workers):
            await running.add_worker()
        yield running
    finally:
        await server.stop()
        for worker in running.workers:
            await worker.die()
        await front.stop()
