"""Addresses: what is one, and what is not."""

from __future__ import annotations

import pytest

from configs.addresses import check_address
from kvstore.discovery.directory import StaticMasters

GOOD = ("127.0.0.1:7711", "localhost:1", "a-host.example:65535", "[::1]:80")
BAD = ("", "nonsense", "host:", ":80", "host:0", "host:65536", "host:8x", "host:\u0664", "::1:80",
       "a b:80", "[]:80", "host:-1")  # fmt: skip


@pytest.mark.parametrize("address", GOOD)
def test_addresses_are_given_back(address: str) -> None:
    assert check_address(address) == address
    assert StaticMasters([address]).masters()[0].address == address


@pytest.mark.parametrize("address", BAD)
def test_what_nobody_can_call_is_refused_at_once(address: str) -> None:
    with pytest.raises(ValueError, match="expected HOST:PORT, seen"):
        check_address(address)
    with pytest.raises(ValueError, match="expected HOST:PORT, seen"):
        StaticMasters([address])
