"""Which network interfaces of this machine carry tcp rails, where the configuration has patterns.

Addresses that are listed (`TransferConfig.rails`) are taken as they are. Else, where there are
patterns, each interface that they allow and that is up is a rail by its first IPv4 address, or
its first IPv6 address if it has no other. Parts of a bond, and what containers are made of, are
none where there is something of metal.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass

from configs.schema import TransferConfig
from transfer.errors import DeviceUnavailable
from transfer.rails.preference import RailChoice, RailKind, rail_ends
from transfer.topology.machine import InterfaceKind, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRails:
    """Our ends of tcp rails.

    Attributes:
        addresses: one for each rail; () = the address that is listened on.
        unused: names of interfaces that are not used, each with the reason.
    """

    addresses: tuple[str, ...] = ()
    unused: tuple[tuple[str, str], ...] = ()


def device_choice(config: TransferConfig) -> RailChoice:
    """Return what the configuration says about RDMA devices."""
    return RailChoice(include=config.devices_include, exclude=config.devices_exclude)


def why_not(choice: RailChoice, name: str) -> str:
    """Say which patterns keep an end from being used; "" if none does."""
    if choice.allows(name):
        return ""
    if RailChoice(include=choice.include).allows(name):
        return "excluded by a pattern"
    return "included by no pattern"


def own_rails(config: TransferConfig, look: Callable[[], Topology]) -> OwnRails:
    """Find our ends of tcp rails; looks at the machine only where there are patterns.

    Raises:
        DeviceUnavailable: the patterns leave no interface that is up.
    """
    choice = RailChoice(include=config.interfaces_include, exclude=config.interfaces_exclude)
    if config.rails or not (choice.include or choice.exclude):
        return OwnRails(addresses=config.rails)
    topology = look()
    ends = {e.name: (e.up, e.addresses) for e in rail_ends(topology, kind=RailKind.INTERFACE)}
    if choice.include:
        ends |= {
            item.name: (True, item.addresses)
            for item in topology.interfaces
            if item.kind is InterfaceKind.LOOPBACK and choice.allows(item.name)
        }
    reasons = {
        name: why_not(choice, name) or ("" if up else "down") for name, (up, _) in ends.items()
    }
    addresses = tuple(_first(ends[name][1]) for name, reason in reasons.items() if not reason)
    if not addresses:
        found = ", ".join(f"{name} ({reason})" for name, reason in reasons.items())
        raise DeviceUnavailable("network interface", f"the patterns leave none of: {found}")
    return OwnRails(addresses=addresses, unused=tuple((n, r) for n, r in reasons.items() if r))


def _first(addresses: tuple[str, ...]) -> str:
    found = [ipaddress.ip_interface(address).ip for address in addresses]
    return str(min(found, key=lambda address: address.version))
