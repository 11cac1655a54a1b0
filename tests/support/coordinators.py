"""Coordinators in threads over a loopback engine, each with a rank loop that only polls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from configs.schema import ElasticConfig
from elastic.coordinator import Coordinator
from elastic.view import Member, Role, View
from tests.support.local_store import LocalStore
from tests.support.loopback_engine import Hub, LoopbackEngine

CONFIG = ElasticConfig(
    bootstrap_timeout_s=60.0,
    install_timeout_s=30.0,
    watch_interval_s=0.2,
    stall_threshold_s=30.0,  # threads of one test process are no processes that stall
)


class Died(BaseException):
    """Ends a worker's thread where it stands, as SIGKILL ends a process."""


class Worker:
    """A rank loop in a thread: it polls, and gives up its pass when it is told to."""

    def __init__(
        self,
        cluster: Cluster,
        rank: int,
        life: int,
        load_hook: Callable[[Worker, View], None] = lambda worker, view: None,
        config: ElasticConfig = CONFIG,
    ) -> None:
        self.cluster = cluster
        self.name = f"{rank:08x}{life:08x}"
        self.engine = LoopbackEngine(cluster.hub, self.name)
        # A node of its own: all "processes" here have the same, living pid.
        identity = Member(
            rank=rank, incarnation=self.name, role=Role.BOTH, node=self.name, address="", pid=1
        )
        self.coordinator = Coordinator(
            config,
            store=cluster.store,
            engine=self.engine,  # type: ignore[arg-type]
            member=self,
            identity=identity,
            num_layers=2,
            num_logical=8,
            expected_workers=cluster.expected,
        )
        self.rank = rank
        self.views: list[View] = []
        self.loads: list[int] = []
        self.error: BaseException | None = None
        self.load_hook: Callable[[View], None] = lambda view: load_hook(self, view)
        self.stop = threading.Event()
        self.leave = threading.Event()
        self.busy = threading.Event()  # in a pass that takes long
        self.accuse: tuple[int, ...] | None = None
        self.prepared = 0
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def committed(self, view: View) -> None:
        pass

    def prepare(self, view: View) -> dict[int, bytes]:
        self.prepared = view.epoch
        return {
            m.rank: f"{view.epoch}:{self.rank}>{m.rank}".encode() for m in view.others(self.name)
        }

    def load(self, view: View) -> None:
        self.loads.append(view.epoch)
        self.load_hook(view)

    def install(self, view: View, offers: dict[int, bytes]) -> None:
        expected = {m.rank: f"{view.epoch}:{m.rank}>{self.rank}" for m in view.others(self.name)}
        assert {rank: offer.decode() for rank, offer in offers.items()} == expected
        assert self.prepared == view.epoch

    def run(self) -> None:
        try:
            self.views.append(self.coordinator.join())
            while not self.stop.is_set():
                if self.busy.is_set():
                    pass
                elif self.accuse is not None:
                    suspects, self.accuse = self.accuse, None
                    self.views.append(self.coordinator.report(suspects, "no message"))
                elif self.leave.is_set():
                    self.coordinator.leave()
                    self.engine.kill()
                    return
                elif (view := self.coordinator.poll()) is not None:
                    self.views.append(view)
                elif self.engine.interrupted.is_set():
                    raise AssertionError("interrupted, and poll() has nothing to say")
                time.sleep(0.001)
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.error = error
        finally:
            self.coordinator.close()

    @property
    def epoch(self) -> int:
        return self.views[-1].epoch if self.views else 0

    def die(self) -> None:
        self.stop.set()
        self.engine.kill()


class Cluster:
    def __init__(self, expected: int, config: ElasticConfig = CONFIG) -> None:
        self.config = config
        self.hub, self.store, self.expected = Hub(), LocalStore(), expected
        self.workers: list[Worker] = []

    def start(
        self,
        rank: int,
        life: int = 0,
        load_hook: Callable[[Worker, View], None] = lambda worker, view: None,
    ) -> Worker:
        self.workers.append(Worker(self, rank, life, load_hook, self.config))
        return self.workers[-1]

    def settle(
        self, workers: list[Worker], ranks: tuple[int, ...], timeout_s: float = 90.0
    ) -> View:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for worker in workers:
                assert worker.error is None, f"rank {worker.rank}: {worker.error!r}"
            view = self.store.read()
            agreed = all(w.views and w.views[-1] == view for w in workers)
            if view is not None and view.ranks == ranks and agreed:
                return view
            time.sleep(0.002)
        seen = {w.rank: (w.epoch, list(w.coordinator._machine.story)[-8:]) for w in workers}
        raise AssertionError(f"no agreement on {ranks}: record {self.store.read()}, {seen}")

    def close(self) -> None:
        for worker in self.workers:
            worker.stop.set()
        for worker in self.workers:
            worker.thread.join(timeout=30)
            worker.engine.close()


def running(expected: int, config: ElasticConfig = CONFIG) -> Cluster:
    """A cluster whose first view is installed."""
    cluster = Cluster(expected, config)
    for rank in range(expected):
        cluster.start(rank)
    cluster.settle(cluster.workers, tuple(range(expected)))
    return cluster
