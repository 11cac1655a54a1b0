"""Clients of one side are started together, and one that cannot measure holds up nobody."""

from __future__ import annotations

import multiprocessing
import random
import threading
from multiprocessing.connection import Connection
from typing import Any

import pytest

from benchmarks.peers.store_side import READY, answer

JOIN_S = 30.0


class Clients:
    """Ends of the pipes that a thread each answers on; `failing` cannot get ready."""

    def __init__(self, count: int, failing: set[int]) -> None:
        self.measured: list[int] = []
        self._failing = failing
        pairs = [multiprocessing.Pipe() for _ in range(count)]
        self.pipes = [ours for ours, _ in pairs]
        self._threads = [
            threading.Thread(target=self._serve, args=(index, theirs))
            for index, (_, theirs) in enumerate(pairs)
        ]
        for thread in self._threads:
            thread.start()

    def _serve(self, index: int, pipe: Connection) -> None:
        with pipe:
            while pipe.recv() is not None:
                if index in self._failing:
                    pipe.send({"error": f"client {index}"})
                    continue
                pipe.send(READY)
                if pipe.recv():
                    self.measured.append(index)
                    pipe.send({"wall_s": 0.5, "count": 3, "p50_us": float(index)})

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for thread in self._threads:
            thread.join(JOIN_S)
            assert not thread.is_alive()
        for pipe in self.pipes:
            pipe.close()


def asked(clients: Clients, count: int) -> dict[str, Any]:
    return answer(clients.pipes, {"op": "put", "size": 1000, "blocks": 2, "clients": count})


def test_figures_of_all_who_measured_are_added_up() -> None:
    clients = Clients(4, failing=set())
    try:
        found = asked(clients, 3)
        assert found["gb_s"] == pytest.approx(3 * 3 * 2000 / 0.5 / 1e9)
        assert (found["count"], found["p50_us"]) == (9, 1.0)
        assert sorted(clients.measured) == [0, 1, 2]
    finally:
        clients.close()


def test_nobody_measures_when_one_client_cannot_and_the_next_request_is_served() -> None:
    broken = random.randrange(4)
    clients = Clients(4, failing={broken})
    try:
        assert asked(clients, 4) == {"error": f"client {broken}"}
        assert clients.measured == []
        clients._failing.clear()
        assert "gb_s" in asked(clients, 4)
        assert sorted(clients.measured) == [0, 1, 2, 3]
    finally:
        clients.close()
