"""Which interfaces carry rails where the configuration has patterns, and whom they talk to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs.schema import TransferConfig
from tests.support.engines import engine_pair, new_engine, offer
from tests.support.machines import machine
from transfer import DeviceUnavailable, allocate
from transfer.rails.own_rails import own_rails
from transfer.topology.machine import Topology

GIANT = "two_sockets_8_gpus_8_nics"


def never() -> Topology:
    raise AssertionError("the machine is not looked at without need")


@pytest.fixture
def look(tmp_path: Path) -> Callable[[str], Callable[[], Topology]]:
    def at(name: str) -> Callable[[], Topology]:
        return lambda: machine(name, tmp_path)

    return at


def config(**fields: Any) -> TransferConfig:
    return TransferConfig(**fields)


def test_without_patterns_the_machine_is_not_looked_at() -> None:
    assert own_rails(config(), never).addresses == ()
    named = config(rails=("10.0.0.1", "10.0.1.1"), interfaces_include=("x*",))
    assert own_rails(named, never).addresses == named.rails, "what is listed is taken as it is"


@pytest.mark.parametrize(
    ("name", "include", "exclude", "addresses"),
    [
        (GIANT, ("ibp*",), ("ibp[12]*",), ("10.11.0.5", "10.12.0.5", "10.13.0.5")),
        (GIANT, (), ("ibp*",), ("10.1.0.5",)),
        (GIANT, ("ibp24s0", "ens*"), (), ("10.1.0.5", "10.10.0.5")),
        ("bonded_nics", ("bond*",), ("bond3",), ("10.20.0.7", "10.20.1.7", "10.20.2.7")),
        ("bonded_nics", ("lo",), (), ("127.0.0.1",)),
        ("cloud_one_nic", ("*",), ("lo",), ("172.31.16.20",)),
        ("devices_down", ("eth*",), (), ("10.30.0.2", "10.30.2.2", "10.30.3.2")),
    ],
)
def test_patterns_choose_interfaces_that_are_up(
    look: Any, name: str, include: Any, exclude: Any, addresses: Any
) -> None:
    chosen = config(interfaces_include=include, interfaces_exclude=exclude)
    assert own_rails(chosen, look(name)).addresses == addresses


def test_what_is_not_used_is_told_with_the_reason(look: Any) -> None:
    chosen = config(interfaces_include=("eth*",), interfaces_exclude=("eth3",))
    assert dict(own_rails(chosen, look("devices_down")).unused) == {
        "eno1": "included by no pattern",
        "eth1": "down",
        "eth3": "excluded by a pattern",
    }


def test_patterns_that_leave_nothing_are_an_error_that_says_what_is_there(look: Any) -> None:
    with pytest.raises(DeviceUnavailable, match=r"eth1 \(down\)"):
        own_rails(config(interfaces_include=("eth1",)), look("devices_down"))


def test_a_pattern_may_not_be_empty() -> None:
    with pytest.raises(ValueError, match="at least 1 character"):
        config(interfaces_include=("",))


def test_a_real_engine_over_the_loopback_interface() -> None:
    with engine_pair("tcp", interfaces_include=("lo",)) as (a, b):
        region = b.register(allocate(4096))
        source = a.register(allocate(4096))
        a.write(b.name, source, offer(b, region, a), 0, 0, 4096).wait(20.0)
        (rail,) = a.explain(b.name).rails
        assert rail.rail == "tcp 127.0.0.1->" + a._table.get(b.name).facts.rails[0]


def test_a_real_engine_without_any_interface_left() -> None:
    engine = new_engine("tcp", interfaces_exclude=("*",))
    with pytest.raises(DeviceUnavailable, match="network interface"):
        engine.open()


def test_addresses_are_paired_not_merely_counted() -> None:
    """One side has more addresses than the other: each of both is in use."""
    first = new_engine("tcp", rails=("127.0.0.1", "127.0.0.2", "127.0.0.3"))
    second = new_engine("tcp", rails=("127.0.0.4", "127.0.0.5"))
    with first, second:
        first.connect(second.address)
        for one, other in ((first, second), (second, first)):
            facts = one._table.get(other.name).facts
            rails = one._links.opener.rails("tcp", facts)
            assert len(rails) == 3
            assert {rail.local for rail in rails} == set(one._config.rails)
            assert {rail.remote for rail in rails} == set(facts.rails)
