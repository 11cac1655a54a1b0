"""Requests of an event loop to the masters: by the loop itself within a host, else by a thread.

ask ─▶ one master of this host ─▶ LoopLine ─▶ reply
   └─▶ several, another host, or anything unusual ─▶ `MasterMap.ask` in a thread
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, Final

from kvstore.client.near_question import NearQuestion
from kvstore.errors import MasterUnavailable
from kvstore.wire import messages as m
from kvstore.wire.envelope import Answer
from kvstore.wire.master_link import ATTEMPT_S, expect
from transfer.control import MESSAGE_BYTES_MAX
from transfer.errors import ControlError
from transfer.loop_line import LoopLine, NotAsked

if TYPE_CHECKING:
    from kvstore.client.master_map import MasterMap
    from kvstore.client.steps import Ask

LOOK_AGAIN_S: Final = 1.0
FOUND_S: Final = 0.1  # a master that takes longer to say who it is is asked by a thread


class LoopRequests:
    """Belongs to one event loop at a time.

    Args:
        link: The way to the masters.
        threads: Where requests wait that the loop cannot make itself.
    """

    def __init__(self, link: MasterMap, threads: Executor) -> None:
        self._link = link
        self._threads = threads
        self._lines: dict[str, LoopLine] = {}
        self._finding: dict[str, asyncio.Future[None]] = {}
        self._look_at_s: dict[str, float] = {}  # where nobody of this host was found

    def close(self) -> None:
        """Hang up."""
        for line in self._lines.values():
            line.close()
        self._lines.clear()

    async def ask(self, effect: Ask) -> m.Reply:
        """Ask; as `MasterMap.ask`."""
        request, timeout_s = effect.request, effect.timeout_s
        left_s = self._link.timeout_s if timeout_s is None else timeout_s
        question = self._link.near_question(request)
        line = None if question is None else await self._line(question.record.address)
        if question is None or line is None:
            return await self._by_thread(effect, left_s)
        deadline_s = time.monotonic() + left_s
        try:
            answer = await self._ask(line, question, left_s)
        except NotAsked:
            return await self._by_thread(effect, deadline_s - time.monotonic())
        except MasterUnavailable:
            left_s = deadline_s - time.monotonic()
            if not question.is_patient or left_s <= 0:
                raise
            return await self._by_thread(effect, left_s)
        if answer.settling or answer.rebuilding:
            return await self._by_thread(effect, deadline_s - time.monotonic(), answer)
        reply: m.Reply = expect(request, answer.reply, effect.expected)
        return reply

    async def _ask(self, line: LoopLine, question: NearQuestion, left_s: float) -> Answer:
        again = question.is_patient and left_s > ATTEMPT_S
        timeout_s = ATTEMPT_S if again else left_s
        reply: bytes | ControlError
        try:
            reply = await line.ask(question.payload, timeout_s)
        except NotAsked:
            raise
        except ControlError as error:
            reply = error
        answer, merged = question.read(reply, again=again)
        if merged is not None and merged.leftovers:
            self._link.tell(merged)
        return answer

    async def _by_thread(self, effect: Ask, left_s: float, first: Answer | None = None) -> m.Reply:
        def ask() -> Any:
            timeout_s = max(0.001, left_s)
            if first is None:
                return self._link.ask(effect.request, effect.expected, timeout_s=timeout_s)
            return self._link.ask(effect.request, effect.expected, timeout_s=timeout_s, first=first)

        reply: m.Reply = await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        return reply

    async def _line(self, address: str) -> LoopLine | None:
        """Return the loop's connection to a master of this host; None if it is elsewhere."""
        line = self._lines.get(address)
        loop = asyncio.get_running_loop()
        if line is not None and not line.closed and line.loop is loop:
            return line
        if time.monotonic() < self._look_at_s.get(address, 0.0):
            return None
        finding = self._finding.get(address)
        if finding is None or finding.get_loop() is not loop:
            finding = asyncio.ensure_future(self._find(address))
            self._finding[address] = finding
        await asyncio.shield(finding)
        return self._lines.get(address)

    async def _find(self, address: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(
                self._threads, self._link.find_line, address, FOUND_S
            )
            for other in [a for a, line in self._lines.items() if line.closed or a == address]:
                self._lines.pop(other).close()
            if found is None:
                self._look_at_s[address] = time.monotonic() + LOOK_AGAIN_S
                return
            while len(self._lines) >= self._link.num_shards:  # of those that lead no more
                self._lines.pop(next(iter(self._lines))).close()
            self._lines[address] = LoopLine(found, address, nbytes_max=MESSAGE_BYTES_MAX)
        finally:
            self._finding.pop(address, None)
