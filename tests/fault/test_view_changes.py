"""Real processes with the real engine: killed, stopped, restarted; every fault is proven."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from configs.schema import ElasticConfig
from elastic.agent import LocalAgent, WorkerGroup
from tests.support.worker_group import COMMAND, Group

# Generous: other work shares the two cores. The measured figures are in docs/elastic.md. Half of
# what a round may take: a death is seen, not found out by a deadline.
INSTALLED_WITHIN_S = 30.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Group]]:
    groups: list[Group] = []

    def make(world_size: int, **options: float) -> Group:
        groups.append(Group(tmp_path, world_size, **options))
        return groups[-1]

    yield make
    for group in groups:
        group.close()


def test_kill_one_replace_it_kill_two(start: Callable[..., Group]) -> None:
    group = start(4)
    names = [group.start(rank) for rank in range(4)]
    group.installed(names, [0, 1, 2, 3])
    group.serving(names)

    killed_at = group.signal(names[2], signal.SIGKILL)
    rest = [names[0], names[1], names[3]]
    took_s = group.installed(rest, [0, 1, 3]) - killed_at
    assert group.ended_by(names[2]) == -signal.SIGKILL
    assert took_s < INSTALLED_WITHIN_S
    group.serving(rest)
    assert group.epoch() == 2

    back = group.start(2)
    group.installed([*rest, back], [0, 1, 2, 3])
    group.serving([*rest, back])
    (loaded, *_) = group.events(back, "loaded")
    assert loaded["served"].get("peer", 0) > 0, "a joiner reads from those that have the experts"

    epoch = group.epoch()
    killed_at = group.signal(rest[1], signal.SIGKILL)
    group.signal(back, signal.SIGKILL)
    left = [names[0], names[3]]
    took_s = group.installed(left, [0, 3]) - killed_at
    assert (group.ended_by(rest[1]), group.ended_by(back)) == (-signal.SIGKILL,) * 2
    assert took_s < INSTALLED_WITHIN_S
    group.serving(left)
    assert group.epoch() in (epoch + 1, epoch + 2), "one view for both deaths, or one for each"


def test_a_short_stop_is_forgiven_a_long_one_is_not(start: Callable[..., Group]) -> None:
    group = start(3, round_timeout_s=6.0)
    names = [group.start(rank) for rank in range(3)]
    group.installed(names, [0, 1, 2])
    group.serving(names)

    group.signal(names[1], signal.SIGSTOP)
    time.sleep(0.5)
    group.signal(names[1], signal.SIGCONT)
    rounds = {name: len(group.events(name, "round")) for name in names}
    group.wait("more rounds", lambda: all(len(group.events(n, "round")) > rounds[n] for n in names))
    assert group.epoch() == 1

    group.signal(names[1], signal.SIGSTOP)
    left = [names[0], names[2]]
    group.installed(left, [0, 2])
    group.serving(left)
    assert group.processes[names[1]].exitcode is None, "it must still be there to wake up"
    time.sleep(0.5)
    epoch = group.epoch()
    group.signal(names[1], signal.SIGCONT)
    assert group.ended_by(names[1]) == 75
    assert group.events(names[1], "evicted")
    group.serving(left)
    assert group.epoch() == epoch, "a sleeper that wakes changes nothing"


def test_leaving_and_a_whole_group_that_restarts(start: Callable[..., Group]) -> None:
    group = start(3)
    names = [group.start(rank) for rank in range(3)]
    group.installed(names, [0, 1, 2])
    group.serving(names)

    group.signal(names[0], signal.SIGTERM)
    rest = names[1:]
    group.installed(rest, [1, 2])
    assert group.ended_by(names[0]) == 0
    assert group.events(names[0], "left")
    served = [group.events(name, "loaded")[-1]["served"] for name in rest]
    assert all("disk" not in counts for counts in served), "the leaver hands its experts over"
    group.serving(rest)

    for name in rest:
        group.signal(name, signal.SIGKILL)
        group.ended_by(name)
    epoch = group.epoch()
    again = [group.start(rank) for rank in range(3)]
    group.installed(again, [0, 1, 2])
    group.serving(again)
    assert group.epoch() == epoch + 1


def test_the_agent_brings_one_back(start: Callable[..., Group], tmp_path: Path) -> None:
    group = start(2)
    agent = LocalAgent(
        ElasticConfig(restart_backoff_s=0.05),
        WorkerGroup(
            command=COMMAND, num_workers=2, environment=group.environment, log_folder=tmp_path
        ),
        store=group.store,
        drain_timeout_s=10.0,
    )
    thread = threading.Thread(target=agent.run)
    thread.start()
    try:
        group.wait("both workers", lambda: len(agent.incarnations()) == 2)
        names, pids = agent.incarnations(), agent.pids()
        group.installed(list(names.values()), [0, 1])
        group.serving(list(names.values()))
        os.kill(pids[1], signal.SIGKILL)
        new = group.wait("a new life", lambda: _other(agent.incarnations().get(1), names[1]))
        now = [names[0], new]
        group.installed(now, [0, 1])
        group.serving(now)
        assert agent.pids()[0] == pids[0]
        assert agent.pids()[1] != pids[1]
        assert group.store.exits([names[1]]) == {names[1]: "signal 9"}
        view = group.store.read()
        assert view is not None
        assert view.ranks == (0, 1), "the new life has the old slot"
    finally:
        agent.request_stop()
        thread.join(timeout=60)
    assert not thread.is_alive()


def _other(found: str | None, old: str) -> str | None:
    return found if found not in (None, old) else None
