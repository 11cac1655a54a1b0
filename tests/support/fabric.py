"""The switch of the RDMA virtual machine: its cables are pulled without starting a program.

A fork of a test process takes longer in there than the transfers that are to be disturbed.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import subprocess

SIOCGIFFLAGS, SIOCSIFFLAGS, SIOCBRDELIF = 0x8913, 0x8914, 0x89A3
IFF_UP = 0x1
NUM_RAILS = 4


def pull(rail: int) -> None:
    """The cable is out: the device's port goes down, and says so."""
    name = f"port{rail}".encode()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock, SIOCGIFFLAGS, struct.pack("16sh14x", name, 0))
        flags = struct.unpack("16sh14x", answer)[1] & ~IFF_UP
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh14x", name, flags))


def lose_silently(rail: int) -> None:
    """Nothing arrives any more, and nobody is told."""
    index = socket.if_nametoindex(f"port{rail}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, SIOCBRDELIF, struct.pack("16si12x", b"fabric", index))


def slow_down(*rails: int, rate: str = "40mbit") -> None:
    """Let a rail carry no more than this."""
    _shape(rails, "rate", rate)


def mute(*rails: int) -> None:
    """Let a rail's device hear everything, and be heard by nobody."""
    _shape(rails, "loss", "100%")


def _shape(rails: tuple[int, ...], *how: str) -> None:
    for rail in rails:
        command = ["tc", "qdisc", "add", "dev", f"nic{rail}", "root", "netem", *how]
        subprocess.run(command, check=True)


def repair() -> None:
    """Put every cable back, and take off what slows a rail."""
    for rail in range(NUM_RAILS):
        command = ["tc", "qdisc", "del", "dev", f"nic{rail}", "root"]
        subprocess.run(command, capture_output=True, check=False)
        for change in (["master", "fabric"], ["up"]):
            subprocess.run(["ip", "link", "set", f"port{rail}", *change], check=True)
