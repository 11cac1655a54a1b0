"""What `explain` says about rails that are not used, and what refusals carry."""

from __future__ import annotations

import pickle

import msgspec
import pytest
import torch

from tests.support.engines import (
    engine_pair,
    new_engine,
    offer,
)
from tests.support.waits import eventually
from transfer import Access, AccessRefused, RegionUnknown, allocate
from transfer.connections.handshake import Facts
from transfer.explanation import Surroundings, _unused_rails
from transfer.statistics import RailStatistics

OWN = Facts(address="10.0.0.1:1", host="h", local_socket="s", shared_memory=True, tcp=True)


def rail(name: str, **fields: object) -> RailStatistics:
    known = {"state": "healthy", "open": True, "bandwidth": 1e9} | fields
    return RailStatistics(peer="p", rail=name, bytes=0, slices=0, failures=0, retries=0,
                          bytes_in_flight=0, **known)  # type: ignore[arg-type] # fmt: skip


def reasons(rails: list[RailStatistics], *planned: tuple[str, str]) -> dict[str, str]:
    around = Surroundings(own=OWN, no_verbs="no device", rails=planned, unused=())
    return dict(_unused_rails(around, rails, now=100.0))


def test_each_rail_that_is_not_used_has_its_reason() -> None:
    told = reasons(
        [
            rail("fast"),
            rail("cold", state="cooling", open=False, failed_at=97.5, evidence="reset"),
            rail("new", state="probing", failed_at=99.0, evidence="no progress"),
            rail("slow", bandwidth=1e8),
            rail("shut", open=False),
        ],
        ("fast", ""),
        ("idle", ""),
        ("far", "its ends share no network"),
    )
    assert told == {
        "cold": "cooling since 2.5 s: reset",
        "new": "probing, after it has failed 1.0 s ago: no progress",
        "slow": "measured slower, 0.10 of 1.00 GB/s",
        "shut": "closed; it is opened again when there is need",
        "idle": "not opened yet",
        "far": "not opened yet; its ends share no network",
    }


def test_a_real_rail_that_has_failed_is_explained() -> None:
    rails = ("127.0.0.1", "127.0.0.2")
    with new_engine("tcp", rails=rails) as a, new_engine("tcp", rails=rails) as b:
        a.connect(b.address)
        text = str(a.explain(b.name))
        assert text.count("not opened yet") == 2
        assert "not verbs: " in text
        region = b.register(allocate(4 << 20))
        key, source = offer(b, region, a), a.register(allocate(4 << 20))
        # The second of the listeners is closed: that rail cannot be opened.
        b._loop.ask(lambda: b._rendezvous._listeners.pop(1).close())
        for _ in range(4):
            a.write(b.name, source, key, 0, 0, 4 << 20, timeout_s=30.0).wait()
        assert "127.0.0.2->127.0.0.2" in str(a.explain(b.name))
        link = a._table.get(b.name)
        assert link is not None
        a._loop.ask(lambda: link.requests.broken(link.requests._links[0], "unplugged"))
        eventually(lambda: bool(a.explain(b.name).rails), "it was open")
        assert a.explain(b.name).rails[0].evidence == "unplugged"


@pytest.mark.parametrize("withdrawn", [True, False])
def test_a_refusal_by_the_owner_says_what_was_under_way(withdrawn: bool) -> None:
    with engine_pair("tcp") as (a, b):
        region, nbytes = b.register(allocate(4 << 20)), 4 << 20
        key = offer(b, region, a, Access.WRITE)
        source = a.register(torch.zeros(nbytes, dtype=torch.uint8))
        a.write(b.name, source, key, 0, 0, 64).wait()
        if withdrawn:
            # As if its word were late: only the owner knows.
            b._offers.withdraw(key.token)
            transfer = a.write(b.name, source, key, 0, 0, nbytes)
        else:
            forged = msgspec.structs.replace(key, rights=3)
            transfer = a.read(b.name, source, forged, 0, 0, nbytes)
        with pytest.raises(RegionUnknown if withdrawn else AccessRefused) as caught:
            transfer.wait(20.0)
        error = caught.value
        assert error.peer == b.name
        assert error.backend == "tcp"
        assert error.rail == "tcp 127.0.0.1->" + b.address
        assert error.attempts >= 1
        assert 0 <= error.bytes_moved < nbytes
        assert error.elapsed_s > 0.0
        assert pickle.loads(pickle.dumps(error)).rail == error.rail
