"""Two rails between two network namespaces; one is cut in the middle of a transfer."""

from __future__ import annotations

import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.worker_process import Worker

CUT_AT_S, REPAIRED_AT_S, SECONDS = 1.0, 5.0, 8.0
# What is reported is the measured stall; this bound only says that nobody waited for a deadline,
# which is twice as long.
STALL_S_MAX = 15.0
HEALTHY_S_MAX = 60.0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


class Wires:
    """Two namespaces, joined by two virtual cables."""

    def __init__(self) -> None:
        tag = secrets.token_hex(2)
        self.spaces = [f"moe-{tag}-a", f"moe-{tag}-b"]
        self.tag = tag

    def lay(self) -> None:
        for space in self.spaces:
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
        for rail in (0, 1):
            ends = [self.device(end, rail) for end in (0, 1)]
            ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for end, space in enumerate(self.spaces):
                ip("link", "set", ends[end], "netns", space)
                ip("-n", space, "addr", "add", f"{self.address(end, rail)}/24", "dev", ends[end])
                ip("-n", space, "link", "set", ends[end], "up")

    def device(self, end: int, rail: int) -> str:
        return f"m{self.tag}{'ab'[end]}{rail}"

    def address(self, end: int, rail: int) -> str:
        return f"10.98.{rail}.{end + 1}"

    def take_down(self, rail: int) -> None:
        ip("-n", self.spaces[0], "link", "set", self.device(0, rail), "down")

    def bring_up(self, rail: int) -> None:
        ip("-n", self.spaces[0], "link", "set", self.device(0, rail), "up")

    def swallow(self, rail: int) -> None:
        """Send everything to a station that does not exist: dropped without a word."""
        self._neighbour(rail, "replace", "02:00:00:00:00:77")

    def deliver(self, rail: int) -> None:
        self._neighbour(rail, "del", "02:00:00:00:00:77")

    def _neighbour(self, rail: int, verb: str, station: str) -> None:
        for end, space in enumerate(self.spaces):
            ip("-n", space, "neigh", verb, self.address(1 - end, rail), "lladdr", station,
               "nud", "permanent", "dev", self.device(end, rail))  # fmt: skip

    def remove(self) -> None:
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, timeout=10)


@pytest.fixture
def wires() -> Iterator[Wires]:
    made = Wires()
    try:
        made.lay()
    except (OSError, subprocess.CalledProcessError) as error:
        made.remove()
        detail = getattr(error, "stderr", b"") or str(error)
        pytest.skip(f"no network namespaces here: {detail!r}")
    yield made
    made.remove()


def transfer_with_trouble(
    owner: Worker, asker: Worker, seed: int, trouble: Callable[[], None]
) -> dict[str, Any]:
    """Let them transfer while `trouble` happens; both ends must agree on what was moved."""
    told, asking = owner.hear(), asker.hear()
    owner.say(name=asking["name"])
    asker.say(**told, **owner.hear())
    assert asker.hear()["started"]
    trouble()
    report = asker.hear()
    owner.say(seed=seed)
    verdict = owner.hear()
    assert not report["errors"], report
    assert report["ended"] == report["posted"]
    assert verdict["equal"], (seed, report)
    assert verdict["immediates"] == report["posted"], "each counted exactly once"
    for worker in (owner, asker):
        worker.say(bye=True)
    return report


@pytest.mark.parametrize("way", ["link down", "swallowed"])
@pytest.mark.parametrize("rail", [1, 0], ids=["data rail", "rail of the control connection"])
def test_a_cut_rail_fails_nothing_and_comes_back(wires: Wires, way: str, rail: int) -> None:
    seed = secrets.randbits(31)
    rails = [[wires.address(end, i) for i in (0, 1)] for end in (0, 1)]
    owner = Worker(space=wires.spaces[1], role="owner", name=secrets.token_hex(8), rails=rails[1])
    asker = Worker(space=wires.spaces[0], role="asker", name=secrets.token_hex(8), rails=rails[0],
                   seconds=SECONDS, healthy_within_s=HEALTHY_S_MAX, seed=seed)  # fmt: skip

    def trouble() -> None:
        time.sleep(CUT_AT_S)
        (wires.take_down if way == "link down" else wires.swallow)(rail)
        time.sleep(REPAIRED_AT_S - CUT_AT_S)
        (wires.bring_up if way == "link down" else wires.deliver)(rail)

    try:
        report = transfer_with_trouble(owner, asker, seed, trouble)
    finally:
        owner.end()
        asker.end()
    by_address = {r["rail"].split()[1].split("->")[0]: r for r in report["rails"]}
    cut, other = (by_address[rails[0][i]] for i in (rail, 1 - rail))
    print(f"\n{way}, rail {rail}: longest time without a completion"
          f" {report['longest_gap_s'] * 1e3:.1f} ms; {report['rails']}")  # fmt: skip
    assert cut["failures"] >= 1, "the fault has fired"
    assert cut["state"] == "healthy", "it is back"
    assert other["bytes"] > 0
    assert report["longest_gap_s"] < STALL_S_MAX
