"""A rail is cut for longer than any connection lives; then the other one is."""

from __future__ import annotations

import secrets
import signal
import time
from typing import Any

import pytest

from tests.fault.transfer.test_rails import Wires, wires
from tests.support.worker_process import Worker

# Longer than the kernel keeps a connection of ours that gets no answer.
CUT_S = 16.0
SETTLE_S = 3.0
LOST_S_MAX = 60.0
SECONDS = 1.0 + CUT_S + SETTLE_S + 10.0 + SETTLE_S

__all__ = ["wires"]


def start(wires: Wires) -> tuple[Worker, Worker, int]:
    """Owner and asker, connected over rail 0, transferring and talking both ways."""
    seed = secrets.randbits(31)
    rails = [[wires.address(end, i) for i in (0, 1)] for end in (0, 1)]
    owner = Worker(space=wires.spaces[1], role="owner", name=secrets.token_hex(8), rails=rails[1])
    asker = Worker(space=wires.spaces[0], role="asker", name=secrets.token_hex(8), rails=rails[0],
                   seconds=SECONDS, seed=seed, chats=True)  # fmt: skip
    told, asking = owner.hear(), asker.hear()
    owner.say(name=asking["name"])
    asker.say(**told, **owner.hear())
    assert asker.hear()["started"]
    owner.say(chat=True)
    return owner, asker, seed


def finish(owner: Worker, asker: Worker, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Let both end; return what the asker and the owner say about it."""
    report = asker.hear()
    owner.say(stop=True)
    stopped = owner.hear()
    assert stopped["stopped"]
    asker.say(tell=True, until_heard=stopped["said"])
    report |= asker.hear()
    owner.say(seed=seed, until_heard=report["chat"]["said"])
    verdict = owner.hear()
    for worker in (owner, asker):
        worker.say(bye=True)
    return report, verdict


def test_one_rail_after_the_other_is_cut_for_long(wires: Wires) -> None:
    owner, asker, seed = start(wires)
    try:
        time.sleep(1.0)
        wires.swallow(0)
        time.sleep(CUT_S)
        wires.deliver(0)
        time.sleep(SETTLE_S)
        wires.take_down(1)
        time.sleep(10.0)
        wires.bring_up(1)
        report, verdict = finish(owner, asker, seed)
    finally:
        owner.end()
        asker.end()
    print(f"\nlongest time without a completion {report['longest_gap_s'] * 1e3:.0f} ms;"
          f" notifies {report['chat']}, {verdict['chat']}")  # fmt: skip
    assert not report["errors"], report
    assert report["ended"] == report["posted"]
    assert verdict["equal"], seed
    assert verdict["immediates"] == report["posted"], "each counted exactly once"
    for one, other in ((report["chat"], verdict["chat"]), (verdict["chat"], report["chat"])):
        assert one["lost"] == []
        assert one["said"] > 500
        assert other["heard"] == one["said"], "none is lost"
        assert other["in_order"], "none comes twice"
        assert one["resumes"] >= 2, "the control connection has changed rails twice"


@pytest.mark.parametrize("who", ["owner", "asker"])
def test_a_peer_that_is_killed_while_a_rail_is_cut_is_lost_soon(wires: Wires, who: str) -> None:
    owner, asker, _ = start(wires)
    victim = owner if who == "owner" else asker
    try:
        time.sleep(1.0)
        wires.swallow(0)
        owner.say(until_resumes=1)
        assert owner.hear()["resumed"], "the control connection runs over rail 1 by now"
        victim.process.send_signal(signal.SIGKILL)
        if who == "asker":
            owner.say(stop=True, until_lost_s=LOST_S_MAX)
            assert owner.hear()["stopped"]
            owner.say(seed=0)
            chat = owner.hear()["chat"]
        else:
            assert "PeerLost" in asker.hear()["errors"][-1], "what was under way has failed"
            # Whoever waits for a transfer may hear of it before it is told.
            asker.say(tell=True, until_lost_s=LOST_S_MAX)
            chat = asker.hear()["chat"]
        assert len(chat["lost"]) == 1
        # Not by the end of its patience, as for a peer whose machine has vanished.
        assert "no way leads to it" not in chat["lost"][0], chat["lost"]
    finally:
        owner.end()
        asker.end()
