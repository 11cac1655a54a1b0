"""Nodes that are stopped for less than what ends them: nothing that they hold is given up."""

from __future__ import annotations

import os
import secrets
import signal
import time

from configs.schema import TransferBackend
from kvstore.wire import messages as m
from tests.support.master_process import WAIT_S, MasterCluster
from tests.support.waits import eventually

SILENCE_S = 30.0


def silent_s(cluster: MasterCluster, node: str) -> float:
    segments = cluster.map.ask(m.ListSegments(), m.SegmentList).segments
    return next(figures.silent_s for figures in segments if figures.where.node == node)


def test_what_a_stopped_node_holds_is_found_again_when_it_goes_on(stack):
    """Though a reader has said meanwhile that it cannot reach it: others are spared the wait."""
    cluster = MasterCluster(
        stack,
        workers=3,
        backend=TransferBackend.TCP,
        node_silence_s=SILENCE_S,
        heartbeat_s=0.2,
        request_timeout_s=2.0,
    )
    writer, reader, _ = cluster.workers
    keys = [secrets.token_bytes(16) for _ in range(6)]
    assert writer.ask("put", keys) == ["stored"] * 6
    found, good, _, places = reader.ask("get", keys)
    assert (found, good) == (6, 6)
    (name,) = set(places)
    holder = next(worker for worker in cluster.workers if worker.name == name)
    reader = next(worker for worker in cluster.workers if worker is not holder)
    present = m.Exists(keys)
    os.kill(holder.process.pid, signal.SIGSTOP)
    stopped_s = time.monotonic()
    try:
        eventually(lambda: silent_s(cluster, name) > SILENCE_S / 3, "it is silent")
        assert cluster.map.ask(present, m.Present).flags == [True] * 6
        assert reader.ask("get", keys)[1] == 0, "it is out of reach"
        assert cluster.map.ask(present, m.Present).flags == [False] * 6
        was_dropped = time.monotonic() - stopped_s > SILENCE_S  # on a machine that is very busy
    finally:
        os.kill(holder.process.pid, signal.SIGCONT)
    eventually(
        lambda: cluster.map.ask(present, m.Present).flags == [True] * 6, "all is there", WAIT_S
    )
    eventually(lambda: reader.ask("get", keys)[:3] == (6, 6, True), "and is read", WAIT_S)
    figures = cluster.figures()
    assert figures.unreachable_blocks >= 1, "a reader has said so"
    assert was_dropped or figures.lost_blocks == 0
