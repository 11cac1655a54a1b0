"""A candidate whose number of shards is another one says so, and does not say it all the time."""

from __future__ import annotations

import logging

import pytest

from configs.kvstore_masters import EtcdConfig
from kvstore.discovery import candidacy as candidacy_module
from kvstore.discovery.candidacy import COMPLAIN_S, LOOK_S, Candidacy
from kvstore.discovery.etcd import EtcdEntry


class Leader:
    address = "127.0.0.1:1"

    def lead(self, *, term, until_s):
        raise AssertionError("it may not lead")

    confirm = stand_down = lead


class Gateway:
    """An etcd that knows one number of shards, or none."""

    def __init__(self, *_, **__):
        self.shards = b"2"

    def create(self, key, value, *, lease=None):
        self.key = key

    def range(self, prefix):
        return 1, [EtcdEntry(key=self.key, value=self.shards, revision=1)] if self.shards else []


@pytest.fixture
def scene(monkeypatch):
    """A candidate of three shards that nothing runs, its etcd, and the time as it sees it."""
    monkeypatch.setattr(candidacy_module, "EtcdGateway", Gateway)
    now = [1000.0]
    config = EtcdConfig(endpoints=("http://127.0.0.1:9",))
    candidacy = Candidacy(config, 0, 3, Leader(), clock=lambda: now[0])
    return candidacy, candidacy._gateway, now


def test_a_disagreement_is_told_when_it_changes_and_then_rarely(scene, caplog):
    candidacy, etcd, now = scene

    def told(looks: int) -> list[str]:
        caplog.clear()
        for _ in range(looks):
            assert candidacy._campaign() == LOOK_S
            now[0] += LOOK_S / 2  # woken between its looks
        assert all(record.levelno == logging.ERROR for record in caplog.records)
        return caplog.messages

    (first,) = told(100)
    assert "b'2'" in first
    assert "b'3'" in first
    etcd.shards = b"5"
    (second,) = told(100)
    assert "b'5'" in second
    etcd.shards = b"2"
    assert told(100) == [first], "it has changed back"
    now[0] += COMPLAIN_S
    assert told(100) == [first], "again, for who reads the newest lines only"
    etcd.shards = None
    assert len(told(1)) == 1
    etcd.shards = b"3"
    assert candidacy._agree()
