"""Processes that stay: one set of ranks for all tests of a module, whatever carries the messages.

    with rank_pool("tcp", 4) as pool:
        pool.run(check, 7, timeout_s=30)      # `check(member, 7)` on every rank, module level

A check that fails leaves the ranks in the middle of something, so the processes are replaced.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from configs.schema import DispatchConfig, MissingExperts, TransferBackend, TransferConfig
from dispatch import (
    CollectiveDispatcher,
    Dispatcher,
    DispatchLayout,
    ExpertMap,
    LocalDispatcher,
    TransferDispatcher,
)
from tests.support.fork_server import CONTEXT
from tests.support.ranks import Board, RankFailed
from transfer import TransferEngine

BACKENDS = ("local", "gloo", "tcp", "shared_memory")
WAIT_S = 60.0
_SECRET = b"the secret of a pool"


class Member:
    """One rank of a pool: makes dispatchers on request, all ranks at once.

    Attributes:
        rank: This rank.
        world_size: Ranks of the pool; 1 for `local`.
        engine: The transfer engine, None for the other backends.
    """

    def __init__(self, board: Board, backend: str) -> None:
        self.rank, self.world_size, self.backend = board.rank, board.world_size, backend
        self.board = board
        self.engine: TransferEngine | None = None
        self._numbers = itertools.count(1)
        self._groups: dict[tuple[int, ...], Any] = {}

    @staticmethod
    def name_of(rank: int) -> str:
        return f"{rank + 1:016x}"

    def open(self) -> None:
        if self.backend == "gloo":
            store = dist.FileStore(str(self.board.directory / "store"), self.world_size)
            dist.init_process_group(
                "gloo",
                store=store,
                rank=self.rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=WAIT_S),
            )
        elif self.backend != "local":
            config = TransferConfig(backend=TransferBackend(self.backend))
            self.engine = TransferEngine(config, name=self.name_of(self.rank), secret=_SECRET)
            self.engine.open()
            for rank, address in self.board.exchange("address", self.engine.address).items():
                if rank < self.rank:
                    self.engine.connect(address, timeout_s=WAIT_S)

    def close(self) -> None:
        if self.backend == "gloo":
            dist.destroy_process_group()
        if self.engine is not None:
            self.engine.close()

    def ranks(self, count: int) -> list[int]:
        """The first `count` ranks, or all there are."""
        return list(range(min(count, self.world_size)))

    def generator(self, seed: int) -> torch.Generator:
        """Other numbers on each rank, from one seed."""
        return torch.Generator().manual_seed(seed + 7919 * (self.rank + 1))

    def meet(self, ranks: Sequence[int] | None = None, value: Any = None) -> dict[int, Any]:
        """Wait for all ranks that take part; all make the same calls in the same order."""
        name = f"meeting-{next(self._numbers)}"
        if self.world_size == 1:
            return {0: value}
        if ranks is not None and self.rank not in ranks:
            return {}
        return self.board.exchange(name, value, None if ranks is None else list(ranks))

    @contextlib.contextmanager
    def dispatcher(
        self,
        layout: DispatchLayout,
        expert_map: ExpertMap | None = None,
        ranks: Sequence[int] | None = None,
        *,
        missing_experts: MissingExperts = MissingExperts.WAIT,
        timeout_s: float = WAIT_S,
    ) -> Iterator[Dispatcher | None]:
        """A dispatcher over these ranks, None on the others. Called by all ranks of the pool."""
        ranks = list(ranks) if ranks is not None else self.ranks(self.world_size)
        if expert_map is None:
            expert_map = ExpertMap.even(
                num_layers=layout.num_layers, num_logical=layout.num_logical, ranks=ranks
            )
        options = {"missing_experts": missing_experts}
        number = next(self._numbers)
        if self.backend == "local":
            yield LocalDispatcher(layout=layout, expert_map=expert_map, **options)
        elif self.backend == "gloo":
            group = self._group(tuple(ranks))
            yield (
                CollectiveDispatcher(
                    layout=layout,
                    expert_map=expert_map,
                    ranks=ranks,
                    process_group=group,
                    **options,
                )
                if self.rank in ranks
                else None
            )
        elif self.rank not in ranks:
            self.meet(ranks)
            yield None
            self.meet(ranks)
        else:
            assert self.engine is not None
            config = DispatchConfig(pass_timeout_s=timeout_s)
            mine = TransferDispatcher(self.engine, config, layout=layout)
            self.install(mine, number, ranks, expert_map, **options)
            try:
                yield mine
                self.meet(ranks)
            finally:
                mine.close()

    def install(
        self,
        dispatcher: TransferDispatcher,
        epoch: int,
        ranks: Sequence[int],
        expert_map: ExpertMap,
        **options: Any,
    ) -> None:
        """Lead a dispatcher into an epoch. Other ranks of the pool call `meet(ranks)` instead."""
        members = {rank: self.name_of(rank) for rank in ranks}
        offers = dispatcher.prepare(
            epoch=epoch, rank=self.rank, members=members, expert_map=expert_map, **options
        )
        everybodys = self.meet(ranks, offers)
        dispatcher.install({r: everybodys[r][self.rank] for r in ranks if r != self.rank})

    def _group(self, ranks: tuple[int, ...]) -> Any:
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(list(ranks))
        return self._groups[ranks]


class RankPool:
    """The processes of one backend, started at the first `run`."""

    def __init__(self, backend: str, world_size: int) -> None:
        self.backend, self.world_size = backend, world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def start(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="pool-")
        for rank in range(self.world_size):
            here, there = CONTEXT.Pipe()
            board = Board(rank, self.world_size, Path(self._directory.name))
            process = CONTEXT.Process(
                target=_serve, args=(board, self.backend, there), name=f"{self.backend}-{rank}"
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 100.0) -> list[Any]:
        """Return what `fn(member, *args)` returned, by rank."""
        if not self._processes:
            self.start()
        try:
            for pipe in self._pipes:
                pipe.send((fn, args))
            return self._answers(timeout_s)
        except BaseException:
            self.close()
            raise

    def _answers(self, timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < self.world_size:
            due = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
            ready = wait(due, timeout=timeout_s)
            if not ready:
                raise RankFailed(f"no answer of {len(due)} ranks after {timeout_s} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = self._pipes.index(pipe)
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    raise RankFailed(f"{self.backend} rank {rank} is gone") from None
                if not ok:
                    raise RankFailed(f"{self.backend} rank {rank}:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join(10.0)
            process.close()
        self._processes, self._pipes = [], []
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None


@contextlib.contextmanager
def rank_pool(backend: str, world_size: int) -> Iterator[RankPool]:
    pool = RankPool(backend, 1 if backend == "local" else world_size)
    try:
        pool.start()
        yield pool
    finally:
        pool.close()


def _serve(board: Board, backend: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    member = Member(board, backend)
    try:
        member.open()
        while True:
            fn, args = pipe.recv()
            try:
                pipe.send((True, fn(member, *args)))
            except BaseException:  # noqa: BLE001 - the test has to hear of it, whatever it was
                pipe.send((False, traceback.format_exc()))
    except EOFError:
        member.close()
