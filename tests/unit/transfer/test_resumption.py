"""When a peer whose control connection is missed is called, and when it counts as lost."""

from __future__ import annotations

from transfer.connections.resumption import (
    AGREE_S,
    GRACE_S,
    MET_S,
    REFUSED,
    RETRY_S_MAX,
    Resumption,
    Way,
)

FIRST, SECOND = Way("10.0.0.1", "10.0.0.2:7"), Way("10.0.1.1", "10.0.1.2:7")
TIMEOUT_S = 5.0


def broken(*ways: Way, now: float = 100.0) -> Resumption:
    made = Resumption(evidence="?", timeout_s=TIMEOUT_S)
    made.add(ways)
    made.become_broken("control connection broke", now)
    return made


def call_all(made: Resumption, now: float) -> list[int]:
    return [idx for idx, _ in made.due(now)]


def test_all_addresses_are_called_at_once_and_each_once() -> None:
    made = broken(FIRST, SECOND, FIRST)
    assert made.due(100.0) == [(0, FIRST), (1, SECOND)]
    assert made.due(200.0) == [], "the calls are under way"


def test_who_is_refused_everywhere_is_dead_at_once() -> None:
    made = broken(FIRST, SECOND)
    call_all(made, 100.0)
    made.failed(0, REFUSED, 100.0, refused=True)
    assert made.verdict(100.0) is None, "the other one may answer"
    made.failed(1, REFUSED, 100.001, refused=True)
    verdict = made.verdict(100.001)
    assert verdict is not None
    assert "control connection broke" in verdict
    assert SECOND.target in verdict


def test_a_cut_rail_holds_up_the_verdict_of_the_other_only_for_a_moment() -> None:
    made = broken(FIRST, SECOND)
    call_all(made, 100.0)
    made.failed(1, REFUSED, 100.0, refused=True)
    assert made.verdict(100.0 + GRACE_S / 2) is None
    assert made.verdict(100.0 + GRACE_S) is not None


def test_a_refusal_does_not_count_beside_an_answer() -> None:
    made = broken(FIRST, SECOND)
    call_all(made, 100.0)
    made.failed(0, REFUSED, 100.0, refused=True)
    made.met(1, 100.1)
    assert made.verdict(100.0 + GRACE_S) is None
    assert made.verdict(100.1 + MET_S) is not None


def test_calls_are_repeated_ever_more_slowly() -> None:
    made, now, gaps = broken(FIRST), 100.0, []
    for _ in range(10):
        assert call_all(made, now) == [0]
        made.failed(0, "EHOSTUNREACH", now, refused=False)
        before = now
        while not any(state.retry_at <= now for state in made._ways):
            now += 0.001
        gaps.append(now - before)
    assert gaps == sorted(gaps)
    assert gaps[0] < 0.02
    assert gaps[-1] <= RETRY_S_MAX + 0.002


def test_nobody_in_time_is_a_loss_unless_bytes_move() -> None:
    made = broken(FIRST)
    call_all(made, 100.0)
    assert made.verdict(104.9) is None
    made.progressed(104.0)
    assert made.verdict(105.1) is None, "another rail moves bytes"
    verdict = made.verdict(109.1)
    assert verdict is not None
    assert "5 s" in verdict


def test_a_silent_connection_alone_is_no_loss() -> None:
    made = Resumption(evidence="control connection silent", timeout_s=TIMEOUT_S)
    made.add([FIRST])
    call_all(made, 100.0)
    made.failed(0, "no answer in time", 105.0, refused=False)
    assert made.verdict(1e6) is None, "a stopped peer may wake"
    made.become_broken("control connection broke", 200.0)
    assert made.verdict(200.0 + TIMEOUT_S) is not None


def test_while_a_socket_waits_for_the_peers_word_nobody_is_called() -> None:
    made = broken(FIRST, SECOND)
    call_all(made, 100.0)
    made.failed(1, "EHOSTUNREACH", 100.0, refused=False)
    made.met(0, 100.0)
    made.agreeing(100.0)
    assert made.due(100.0 + AGREE_S / 2) == []
    made.become_broken("that one broke too", 100.6)
    assert call_all(made, 100.6) == [1]
    assert call_all(made, 100.0 + AGREE_S) == [0]
