"""Ranks that die, hang and come back late, in every part of an exchange.

Each fault is proven to have fired: a killed rank must end by that signal, a stopped one tells the
board just before it stops and what became of it afterwards.
"""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
import torch

from configs.schema import TransferBackend
from dispatch import CallOrder, DispatchError, ExpertMap, PassFailed, StaleEpoch
from dispatch.delivery import Delivery
from tests.support.dispatch_rank import LAYOUT, DispatchRank
from tests.support.moe_reference import draw_map, draw_tokens
from tests.support.ranks import Board, run_ranks
from transfer import Interrupted, TransferError

VICTIM = 1
GENEROUS_S = 60.0  # for what takes milliseconds on an idle machine

POINTS = ("before dispatch", "inside dispatch", "before combine", "inside combine")


def reach(mine: DispatchRank, point: str, act, hot: int | None = None) -> None:
    """Run a pass up to `point` and act there. `inside`: with one of the messages written."""
    tokens = draw_tokens(LAYOUT, 6 if hot is None else 12, mine.generator, hot=hot)
    mine.dispatcher.begin_pass()
    if point == "before dispatch":
        act()
    send, acted = Delivery._send, []

    def send_then_act(self, stamp, *rest):
        send(self, stamp, *rest)
        if point == f"inside {stamp.phase}" and not acted:
            acted.append(True)
            act()

    Delivery._send = send_then_act
    try:
        arrived, handle = mine.dispatcher.dispatch(*tokens, layer=0)
        if point == "before combine":
            act()
        mine.dispatcher.combine(arrived.rows, handle)
    finally:
        Delivery._send = send


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail_a_pass(mine: DispatchRank) -> PassFailed | Interrupted:
    """Run exchanges until one fails; checks that the dispatcher is unusable then."""
    tokens = draw_tokens(LAYOUT, 4, mine.generator)
    handles = []

    def exchanges() -> None:
        for layer in (0, 1, 0, 1):
            arrived, handle = mine.dispatcher.dispatch(*tokens, layer=layer)
            handles.append((arrived.rows, handle))
            mine.dispatcher.combine(arrived.rows, handle)

    mine.dispatcher.begin_pass()
    with pytest.raises((PassFailed, Interrupted)) as caught:
        exchanges()
    with pytest.raises(CallOrder):
        mine.dispatcher.begin_pass()
    with pytest.raises(CallOrder):
        mine.dispatcher.dispatch(*tokens, layer=0)
    for rows, handle in handles:
        with pytest.raises(StaleEpoch):
            mine.dispatcher.combine(rows, handle)
    assert mine.dispatcher.pass_started_by_peer() == []
    return caught.value


def killed_rank(
    board: Board,
    backend: TransferBackend,
    point: str,
    seed: int,
    slack: float = 2.0,
    hot: int | None = None,
):
    """Lose the victim, go on without it; returns whom a survivor suspects, and on what evidence."""
    ranks = list(range(board.world_size))
    survivors = [rank for rank in ranks if rank != VICTIM]
    placing = torch.Generator().manual_seed(seed)
    first = draw_map(LAYOUT, ranks, placing)
    if hot is not None:
        first = ExpertMap.even(num_layers=2, num_logical=9, ranks=ranks)
    with DispatchRank(
        board, backend=backend, pass_timeout_s=GENEROUS_S, window_slack=slack
    ) as mine:
        mine.install(1, ranks, first)
        mine.check_pass(3)
        board.exchange("checked", None)  # a note of the victim may still be read until here
        if board.rank == VICTIM:
            reach(mine, point, die, hot)
        failure = fail_a_pass(mine)
        mine.abort(survivors)
        mine.engine.disconnect(mine.name_of(VICTIM), reason="lost")
        mine.install(2, survivors, draw_map(LAYOUT, survivors, placing))
        for num_tokens in (0, 5, 12):
            mine.check_pass(num_tokens)
        board.exchange("done", None, survivors)
        assert slack >= 1 or mine.dispatcher.statistics().grown_windows > 0
        if isinstance(failure, Interrupted):
            return (), str(failure)
        return failure.suspects, failure.evidence


def found_late(results) -> list[str]:
    """What survivors saw who waited for the whole of the pass's time."""
    return [results[rank][1] for rank in (0, 2) if "message for" in results[rank][1]]


@pytest.mark.parametrize("backend", [TransferBackend.SHARED_MEMORY, TransferBackend.TCP])
@pytest.mark.parametrize("point", POINTS)
def test_survivors_of_a_killed_rank_go_on_without_it(point, backend):
    seed = random.randrange(1 << 32)
    results = run_ranks(
        3, killed_rank, backend, point, seed, timeout_s=180, exits={VICTIM: -signal.SIGKILL}
    )
    named = [results[rank][0] for rank in (0, 2)]
    # A survivor may also find that the other one has already left the epoch: it accuses nobody.
    assert set(named) <= {(VICTIM,), ()}, (seed, results)
    assert (VICTIM,) in named, (seed, results)
    assert not found_late(results), "seen by the lost connection, not by a deadline"


@pytest.mark.parametrize("backend", [TransferBackend.SHARED_MEMORY, TransferBackend.TCP])
@pytest.mark.parametrize("point", ["inside dispatch", "inside combine"])
def test_a_rank_dies_while_its_windows_grow(point, backend):
    """Its message may be a note by then, about memory that ends with it."""
    seed = random.randrange(1 << 32)
    results = run_ranks(
        3, killed_rank, backend, point, seed, 0.05, timeout_s=180, exits={VICTIM: -signal.SIGKILL}
    )
    named = [results[rank][0] for rank in (0, 2)]
    assert set(named) <= {(VICTIM,), ()}, (seed, results)
    assert (VICTIM,) in named, (seed, results)


def unread_note(board: Board, backend: TransferBackend, point: str, seed: int):
    """As `killed_rank`; rank 0 comes to read the victim's note only when the victim is dead."""
    follow = Delivery._follow

    def too_late(self, stamp, shared, route, marks):
        if board.rank == 0 and route.rank == VICTIM and stamp.pass_id == 1:
            while any(route.name == peer.name for peer in self._engine.peers()):
                time.sleep(0.01)
            board.post("too late")
        follow(self, stamp, shared, route, marks)

    Delivery._follow = too_late
    try:
        return killed_rank(board, backend, point, seed, 0.05, hot=0)  # an expert of rank 0
    finally:
        Delivery._follow = follow
        assert board.rank != 0 or board.has("too late")


@pytest.mark.parametrize("backend", [TransferBackend.SHARED_MEMORY, TransferBackend.TCP])
def test_nobody_waits_for_who_could_not_read_a_dead_ranks_message(backend):
    """Rank 2 holds all that the victim has sent: only rank 0 can tell it that the pass is lost."""
    seed = random.randrange(1 << 32)
    results = run_ranks(
        3,
        unread_note,
        backend,
        "inside combine",
        seed,
        timeout_s=180,
        exits={VICTIM: -signal.SIGKILL},
    )
    assert results[0][0] == (VICTIM,), (seed, results)
    assert results[2][0] in ((VICTIM,), ()), (seed, results)
    assert not found_late(results), "told, not found out by a deadline"


def stopped_rank(board: Board, point: str, seed: int):
    ranks = list(range(board.world_size))
    survivors = [rank for rank in ranks if rank != VICTIM]
    timeout_s = 8.0
    with DispatchRank(board, pass_timeout_s=timeout_s) as mine:
        mine.install(1, ranks, ExpertMap.even(num_layers=2, num_logical=9, ranks=ranks))
        mine.check_pass(3)
        if board.rank == VICTIM:
            return zombie(mine, point)
        old_windows = [part for w in mine.dispatcher._windows.values() for part in w.parts]
        start = time.monotonic()
        failure = fail_a_pass(mine)
        assert timeout_s * 0.9 < time.monotonic() - start < GENEROUS_S
        pid = board.read("stopping")
        mine.install(2, survivors, draw_map(LAYOUT, survivors, torch.Generator().manual_seed(seed)))
        mine.check_pass(5)
        if board.rank == 0:
            os.kill(pid, signal.SIGCONT)
        over = False
        for number in range(2000):
            for part in old_windows:
                part[:] = number & 0xFF  # the most a zombie can do to the memory it still has
            mine.check_pass(number % 13)
            if board.rank == 0:  # ranks have to agree on the last pass
                board.post(f"over-{number}", number > 40 and board.has("zombie"))
            over = board.read(f"over-{number}")
            if over:
                break
            time.sleep(0.005)
        assert over, "the zombie did not wake up"
        board.exchange("done", None, survivors)
        return failure.suspects


def zombie(mine: DispatchRank, point: str) -> str:
    def stop() -> None:
        mine.board.post("stopping", os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)

    outcome = "went on"
    try:
        reach(mine, point, stop)
        # The exchange it was in may have been complete on its side; the next cannot be.
        mine.dispatcher.dispatch(*draw_tokens(LAYOUT, 6, mine.generator), layer=1)
    except (DispatchError, TransferError) as error:
        outcome = f"{type(error).__name__}: {error}"
    mine.board.post("zombie", outcome)
    return outcome


@pytest.mark.parametrize("point", ["before dispatch", "inside combine"])
def test_a_stopped_rank_is_named_and_its_late_writes_harm_nobody(point):
    results = run_ranks(3, stopped_rank, point, random.randrange(1 << 32), timeout_s=180)
    # With one message of the victim in hand, rank 2 waits one phase further on, for both others.
    assert results[0] == (VICTIM,)
    assert VICTIM in results[2]
    assert results[VICTIM].startswith("PassFailed"), results
