"""Who is out of a node's segments: only whose end is proved, and who has no access."""

from __future__ import annotations

import time

import pytest

from kvstore.node import writer_witness
from kvstore.node.writer_witness import WriterWitness
from transfer import PeerUnknown


class Process:
    exited = False


class Engine:
    name = "node"

    def __init__(self):
        self.peers = {}  # name -> its process, None over tcp, an error if nobody can tell

    def peer(self, name):
        if name not in self.peers:
            raise PeerUnknown(name)
        return name

    def process_of(self, name):
        process = self.peers[self.peer(name)]
        if isinstance(process, Exception):
            raise process
        return process


class Scene:
    def __init__(self):
        self.engine, self.cut, self.hangs = Engine(), [], False
        self.disks = []  # who was cut off from them
        self.witness = WriterWitness(self.engine, self.cut_off, period_s=1e6)

    def cut_off(self, name, *, disks):
        (self.disks if disks else self.cut).append(name)
        return not (disks and self.hangs)

    def admit(self, name, process=None):
        self.engine.peers[name] = process
        return self.witness.admit(name, lambda: "key")

    def lose(self, name):
        del self.engine.peers[name]
        self.witness.lost(name)


@pytest.fixture
def scene():
    return Scene()


def test_a_process_has_to_end_and_its_link_too(scene):
    process = Process()
    assert scene.admit("w", process) == ("key", False)
    process.exited = True
    assert scene.witness.cut_off(["w"]) == [], "what it sent may not have come yet"
    process.exited = False
    scene.lose("w")
    assert not scene.witness.is_due(0.0)
    assert scene.witness.cut_off_dead() == scene.witness.cut_off(["w"]) == scene.cut == []
    process.exited = True
    assert scene.witness.is_due(0.0)
    assert scene.witness.cut_off_dead() == scene.cut == ["w"]
    assert scene.witness.is_out("w")
    assert scene.witness.is_due(0.0), "until all masters know"
    scene.witness.asked(["w"], 0.0)
    assert not scene.witness.is_due(1.0)
    assert scene.witness.cut_off_dead() == []


def test_who_only_lost_its_link_is_told_when_it_comes_back(scene):
    assert scene.admit("w") == ("key", False)
    assert scene.witness.cut_off(["w", "node"]) == [], "they are there"
    scene.lose("w")
    assert scene.witness.cut_off_dead() == [], "it may live"
    assert scene.witness.cut_off(["w"]) == ["w"]
    assert scene.witness.is_out("w")
    for _ in range(2):  # the first offer may be lost
        assert scene.admit("w") == ("key", True)
        assert not scene.witness.is_out("w")


def test_of_whom_nobody_can_tell_nothing_is_said(scene):
    scene.admit("w", OSError("no process"))
    scene.lose("w")
    scene.admit("w", Process())
    scene.lose("w")
    assert scene.witness.cut_off(["w"]) == scene.witness.cut_off_dead() == []


def test_nor_of_whom_somebody_else_gave_a_key(scene):
    scene.witness.trust("w")
    assert scene.witness.cut_off(["w"]) == scene.witness.cut_off_dead() == []


def test_a_link_over_tcp_does_not_make_the_mapping_forgotten(scene):
    process = Process()
    scene.admit("w", process)
    scene.lose("w")
    scene.admit("w", None)
    scene.lose("w")
    assert scene.witness.cut_off(["w"]) == []
    process.exited = True
    assert scene.witness.cut_off_dead() == ["w"]


def test_who_left_is_not_watched_any_longer(scene):
    process = Process()
    for name in ("v", "w", "x"):
        scene.admit(name, process)
    scene.witness.left("nobody that was here")
    for name in ("v", "w"):
        scene.witness.left(name)
    scene.admit("w", process)  # it has asked again
    for name in ("v", "w", "x"):
        scene.lose(name)
    scene.witness.left("x")  # its keys are void: it said nothing
    assert set(scene.witness._processes) == {"w", "x"}
    assert not scene.witness._left
    assert scene.witness.cut_off(["v", "w", "x"]) == ["v"], "the others may have it mapped"
    process.exited = True
    assert sorted(scene.witness.cut_off_dead()) == ["w", "x"]


def test_nobody_is_forgotten_who_may_come_back(scene, monkeypatch):
    monkeypatch.setattr(writer_witness, "CUT_MAX", 3)
    names = [str(number) for number in range(5)]
    assert scene.witness.cut_off(names) == names
    assert all(scene.admit(name) == ("key", True) for name in names)


@pytest.mark.parametrize("process", [None, Process(), OSError("no process")])
def test_of_disks_everybody_is_out_who_has_no_link(scene, process):
    scene.admit("w", process)
    assert scene.witness.cut_off(["w"], disks=True) == [], "it is there"
    scene.lose("w")
    assert scene.witness.cut_off(["w", "node"], disks=True) == scene.disks == ["w"]
    assert scene.witness.is_out("w")
    assert scene.cut == [], "its keys to memory are those of a process that may live"
    assert scene.admit("w", process) == ("key", True)
    assert not scene.witness.is_out("w")


def test_nobody_is_out_for_whom_a_disk_still_writes(scene):
    process = Process()
    for name in ("v", "w"):
        scene.admit(name, process)
        scene.lose(name)
    process.exited, scene.hangs = True, True
    assert sorted(scene.witness.cut_off_dead()) == ["v", "w"], "of memory they are out"
    now = time.monotonic()
    assert scene.witness.cut_off_dead(disks=True) == []
    assert len(scene.disks) == 1, "of those that hang one is waited for"
    scene.witness.asked([], now)
    (hanging,) = scene.disks
    scene.witness._lost &= {hanging}
    assert not scene.witness.is_due(now), "not at every heartbeat"
    assert scene.witness.is_due(now + 2 * writer_witness.AWAITED_S)
    scene.hangs = False
    assert scene.witness.cut_off_dead(disks=True) == [hanging]
    scene.witness.asked([hanging], now)
    assert not scene.witness._awaited
    assert not scene.witness.is_due(now + 2 * writer_witness.AWAITED_S)
