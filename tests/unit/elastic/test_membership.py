"""The machine of one process, step by step: events in, instructions out."""

from __future__ import annotations

import pytest

from elastic import plan
from elastic.errors import RecordInvalid
from elastic.evidence import Evidence, EvidenceKind
from elastic.membership import Membership
from elastic.messages import Abort, Alive, Committed, Offer, Probe, Ready, decode, encode
from elastic.phase import Phase
from elastic.protocol import (
    Adopt,
    Depart,
    Event,
    Fence,
    Install,
    Instruction,
    LeaveAsked,
    Load,
    Loaded,
    OwnStall,
    PassDropped,
    Prepare,
    Prepared,
    ProposalAnswered,
    Propose,
    ReadRecord,
    Received,
    RecordRead,
    Send,
    Suspected,
    Tick,
    Timing,
)
from elastic.view import View
from tests.support.membership_network import member

TIMING = Timing()
FOUR = plan.first_view([member(rank) for rank in range(4)], num_layers=2, num_logical=8)
NAMES = [member(rank).incarnation for rank in range(4)]
LOST = Evidence(kind=EvidenceKind.CONNECTION_LOST, detail="end of file")
ENDED = Evidence(kind=EvidenceKind.PROCESS_EXIT, detail="end of file")
LATE = Evidence(kind=EvidenceKind.DEADLINE, detail="no message")


class Driver:
    """A machine and its clock."""

    def __init__(self, rank: int = 0) -> None:
        self.machine = Membership(rank=rank, incarnation=NAMES[rank], timing=TIMING)
        self.now = 100.0

    def __call__(self, event: Event, after_s: float = 0.0) -> list[Instruction]:
        self.now += after_s
        return self.machine.step(event, self.now)

    def tick(self, after_s: float = 0.0) -> list[Instruction]:
        return self(Tick(), after_s)

    def install(self, view: View, *, already: bool = False) -> list[Instruction]:
        """Go through the installation of `view` with everybody else ready at once."""
        if not already:
            self(RecordRead(view))
        me = self.machine.incarnation
        out = self(Prepared(view.epoch, {m.rank: b"mine" for m in view.others(me)}))
        out += self(Loaded(view.epoch))
        for other in view.others(me):
            offer = Offer(view.epoch, f"from {other.rank}".encode(), ready=True)
            out += self(Received(other.incarnation, offer))
        return out


@pytest.fixture
def serving() -> Driver:
    driver = Driver()
    driver.install(FOUR)
    assert driver.machine.phase is Phase.SERVING
    return driver


def test_first_installation_step_by_step() -> None:
    driver = Driver()
    assert driver.machine.phase is Phase.OUTSIDE
    assert driver(RecordRead(FOUR)) == [Adopt(FOUR), Prepare(FOUR)]
    sent = driver(Prepared(1, {1: b"a", 2: b"b", 3: b"c"}))
    assert sent == [
        Send((NAMES[1],), Offer(1, b"a", ready=False)),
        Send((NAMES[2],), Offer(1, b"b", ready=False)),
        Send((NAMES[3],), Offer(1, b"c", ready=False)),
        Load(FOUR),
    ]
    assert driver(Received(NAMES[1], Offer(1, b"x", ready=True))) == []
    assert driver(Received(NAMES[2], Ready(1))) == []
    assert driver(Received(NAMES[2], Offer(1, b"y", ready=False))) == []
    assert driver(Loaded(1)) == [Send((NAMES[1], NAMES[2], NAMES[3]), Ready(1))]
    assert driver(Received(NAMES[3], Offer(1, b"z", ready=False))) == []
    assert driver.machine.waiting_for == (3,)
    assert driver(Received(NAMES[3], Ready(1))) == [Install(FOUR, {1: b"x", 2: b"y", 3: b"z"})]
    assert driver.machine.phase is Phase.SERVING
    assert driver.machine.wake_at is None


def test_a_death_from_evidence_to_installation(serving: Driver) -> None:
    abort = Send((NAMES[1], NAMES[2]), Abort(1, (NAMES[3],), str(ENDED)))
    assert serving(Suspected((NAMES[3],), ENDED)) == [abort]
    assert serving.machine.phase is Phase.AGREEING
    assert serving.tick() == []  # a moment for more losses
    (proposal,) = serving.tick(TIMING.gather_s)
    assert isinstance(proposal, Propose)
    assert proposal.view == plan.view_without(FOUR, [NAMES[3]])
    view = proposal.view
    assert serving(ProposalAnswered(view, view)) == [
        Send((NAMES[1], NAMES[2]), Committed(2, view.encode())),
        Fence((NAMES[3],), "not in the view of epoch 2"),
        Adopt(view),
        Prepare(view),
    ]
    out = serving.install(view, already=True)
    assert out[-1] == Install(view, {1: b"from 1", 2: b"from 2"})


def test_offer_and_ready_are_one_message_when_nothing_is_to_be_loaded(serving: Driver) -> None:
    same = plan.view_without(FOUR, [])
    serving(RecordRead(same))
    assert serving(Prepared(2, {1: b"a", 2: b"b", 3: b"c"})) == [Load(same)]
    out = serving(Loaded(2))
    assert Send((NAMES[1],), Offer(2, b"a", ready=True)) in out
    assert len(out) == 3


def test_losses_close_together_make_one_view(serving: Driver) -> None:
    serving(Suspected((NAMES[3],), ENDED))
    serving(Suspected((NAMES[2],), ENDED), TIMING.gather_s / 2)
    (proposal,) = serving.tick(TIMING.gather_s / 2)
    assert isinstance(proposal, Propose)
    assert proposal.view.ranks == (0, 1)


def test_the_loser_adopts_and_proposes_what_is_left(serving: Driver) -> None:
    serving(Suspected((NAMES[3],), ENDED))
    (proposal,) = serving.tick(TIMING.gather_s)
    assert isinstance(proposal, Propose)
    winner = plan.view_without(FOUR, [NAMES[2]])
    assert serving(ProposalAnswered(proposal.view, winner)) == [Adopt(winner)]
    (second,) = serving.tick(TIMING.gather_s)
    assert isinstance(second, Propose)
    assert (second.view.epoch, second.view.ranks) == (3, (0, 1))
    out = serving(ProposalAnswered(second.view, second.view))
    assert Fence((NAMES[3],), "not in the view of epoch 3") in out
    out = serving.install(second.view, already=True)
    # Rank 2 was removed without our knowing anything bad: it is cut off only now.
    assert out[-2:] == [
        Fence((NAMES[2],), "not in the view of epoch 3"),
        Install(second.view, {1: b"from 1"}),
    ]


def test_deadline_is_confirmed_by_a_probe(serving: Driver) -> None:
    assert serving(Suspected((NAMES[2], NAMES[3]), LATE)) == [Send((NAMES[2], NAMES[3]), Probe(1))]
    assert serving(PassDropped()) == []
    assert serving.tick(TIMING.probe_s / 2) == []
    assert serving(Received(NAMES[2], Alive(1))) == []
    abort, proposal = serving.tick(TIMING.probe_s) + serving.tick(TIMING.gather_s)
    assert isinstance(abort, Send)
    assert isinstance(abort.message, Abort)
    assert abort.message.suspects == (NAMES[3],)
    assert isinstance(proposal, Propose)
    assert proposal.view.ranks == (0, 1, 2)


def test_if_all_answer_the_same_members_start_anew(serving: Driver) -> None:
    serving(Suspected((NAMES[2],), LATE))
    serving(PassDropped())
    serving(Received(NAMES[2], Alive(1)), 0.01)
    (proposal,) = serving.tick()
    assert proposal == Propose(plan.view_without(FOUR, []))


def test_own_stall_accuses_nobody_and_reads_the_record(serving: Driver) -> None:
    assert serving(OwnStall()) == [ReadRecord()]
    assert serving(RecordRead(FOUR)) == []
    assert serving(Suspected((NAMES[1], NAMES[2], NAMES[3]), LATE)) == []
    assert serving(PassDropped()) == []
    assert serving.tick() == [Propose(plan.view_without(FOUR, []))]


def test_own_stall_then_not_in_the_record(serving: Driver) -> None:
    serving(OwnStall())
    without_us = plan.view_without(FOUR, [NAMES[0]])
    assert serving(RecordRead(without_us)) == [Depart(without_us, asked=False)]
    assert serving.machine.phase is Phase.EVICTED
    assert serving(Suspected((NAMES[1],), ENDED)) == []
    assert serving.tick() == []


def test_an_accusation_alone_removes_nobody(serving: Driver) -> None:
    assert serving(Received(NAMES[1], Abort(1, (NAMES[3],), "x"))) == []
    assert serving.machine.phase is Phase.AGREEING
    assert serving.tick() == []
    assert serving.tick(TIMING.follow_s) == [Send((NAMES[3],), Probe(1))]
    assert serving(Received(NAMES[3], Alive(1)), 0.01) == []
    assert serving.tick() == [Propose(plan.view_without(FOUR, []))]


def test_an_accuser_that_is_lost_takes_only_itself(serving: Driver) -> None:
    serving(Received(NAMES[1], Abort(1, (NAMES[2], NAMES[3]), "x")))
    serving(Suspected((NAMES[1],), LOST))
    (proposal,) = serving.tick(TIMING.gather_s)
    assert isinstance(proposal, Propose)
    assert proposal.view.ranks == (0, 2, 3)


def test_being_accused_is_answered_by_waiting_for_the_view(serving: Driver) -> None:
    serving(Received(NAMES[1], Abort(1, (NAMES[0],), "x")))
    assert serving.tick(TIMING.follow_s / 2) == []
    without_us = plan.view_without(FOUR, [NAMES[0]])
    out = serving(Received(NAMES[1], Committed(2, without_us.encode())))
    assert out == [Depart(without_us, asked=False)]


def test_an_announcement_of_no_view_leads_to_the_record(serving: Driver) -> None:
    for nonsense in (b"", b"{}", FOUR.encode()[:-1]):
        assert serving(Received(NAMES[1], Committed(2, nonsense))) == [ReadRecord()]
        assert serving.machine.phase is Phase.SERVING


def test_who_lost_the_majority_without_proof_lets_it_go_first() -> None:
    driver = Driver(rank=3)
    driver.install(FOUR)
    driver(Suspected((NAMES[0], NAMES[1], NAMES[2]), LOST))
    assert driver.tick(TIMING.gather_s) == []
    assert driver.machine.wake_at == pytest.approx(driver.now + TIMING.minority_s)
    without_us = plan.view_without(FOUR, [NAMES[3]])
    assert driver(RecordRead(without_us)) == [Depart(without_us, asked=False)]


def test_proof_needs_no_majority() -> None:
    driver = Driver(rank=3)
    driver.install(FOUR)
    driver(Suspected((NAMES[0], NAMES[1], NAMES[2]), ENDED))
    (proposal,) = driver.tick(TIMING.gather_s)
    assert isinstance(proposal, Propose)
    assert proposal.view.ranks == (3,)


def test_of_two_halves_the_lowest_rank_goes_first() -> None:
    for rank, lost, waits in ((0, (2, 3), False), (2, (0, 1), True)):
        driver = Driver(rank)
        driver.install(FOUR)
        driver(Suspected(tuple(NAMES[r] for r in lost), LOST))
        assert (driver.tick(TIMING.gather_s) == []) is waits
        assert driver.tick(TIMING.minority_s) != []


def test_late_members_become_suspects(serving: Driver) -> None:
    joined = plan.view_with(FOUR, member(4))
    serving(RecordRead(joined))
    serving(Prepared(2, dict.fromkeys((1, 2, 3, 4), b"m")))
    serving(Loaded(2))
    for rank in (1, 2, 3):
        serving(Received(NAMES[rank], Offer(2, b"o", ready=True)))
    assert serving.tick(TIMING.install_s / 2) == []
    (abort,) = serving.tick(TIMING.install_s / 2)
    assert isinstance(abort, Send)
    assert abort.message == Abort(
        2, (member(4).incarnation,), "deadline: not ready for epoch 2 within 20 s"
    )
    (proposal,) = serving.tick(TIMING.gather_s)
    assert isinstance(proposal, Propose)
    assert (proposal.view.epoch, proposal.view.ranks) == (3, (0, 1, 2, 3))


def test_messages_that_overtake_their_view_are_kept(serving: Driver) -> None:
    same = plan.view_without(FOUR, [])
    for rank in (1, 2, 3):
        assert serving(Received(NAMES[rank], Offer(2, b"early", ready=True))) == []
    assert serving.machine.phase is Phase.SERVING
    assert serving.tick(TIMING.overtaken_s) == [ReadRecord()]
    serving(RecordRead(same))
    serving(Prepared(2, {}))
    out = serving(Loaded(2))
    assert out[-1] == Install(same, {1: b"early", 2: b"early", 3: b"early"})


def test_old_and_foreign_messages_are_dropped(serving: Driver) -> None:
    serving.install(plan.view_without(FOUR, []))
    assert serving(Received(NAMES[1], Abort(1, (NAMES[3],), "old"))) == []
    assert serving(Received(NAMES[1], Offer(1, b"old", ready=True))) == []
    assert serving(Received("stranger", Offer(2, b"?", ready=True))) == []
    assert serving(Suspected(("stranger",), ENDED)) == []
    assert serving(RecordRead(FOUR)) == []
    assert serving(RecordRead(None)) == []
    assert serving.machine.phase is Phase.SERVING


def test_a_proposal_without_answer_is_made_again(serving: Driver) -> None:
    serving(Suspected((NAMES[3],), ENDED))
    first = serving.tick(TIMING.gather_s)
    assert serving.tick() == []
    assert serving.tick(TIMING.retry_s) == first


def test_leaving(serving: Driver) -> None:
    assert serving(LeaveAsked()) == []
    (proposal,) = serving.tick()
    assert isinstance(proposal, Propose)
    assert proposal.view.ranks == (1, 2, 3)
    out = serving(ProposalAnswered(proposal.view, proposal.view))
    assert out[-1] == Depart(proposal.view, asked=True)
    assert serving.machine.phase is Phase.LEFT


def test_story_is_bounded(serving: Driver) -> None:
    for _ in range(500):
        serving(RecordRead(FOUR))
    assert len(serving.machine.story) <= 64


@pytest.mark.parametrize(
    "message",
    [
        Abort(3, ("a", "b"), "why"),
        Committed(4, FOUR.encode()),
        Offer(5, bytes(range(256)), ready=True),
        Ready(1 << 40),
        Probe(1),
        Alive(1),
    ],
)
def test_message_round_trip(message: Abort | Committed | Offer | Ready | Probe | Alive) -> None:
    assert decode(encode(message)) == message


def test_other_payloads() -> None:
    assert decode(b"kvstore:something") is None
    with pytest.raises(RecordInvalid):
        decode(b"elastic.view:\xc1")
