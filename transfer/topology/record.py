"""Recorded machines: what `read_topology` reads of one, as a JSON document to send to others.

    {"note": ..., "files": {path: text}, "links": {path: target}, "folders": [...],
     "addresses": {interface: [address, ...]}}

Paths are relative to the root, links lead to paths of the same kind. A record has no serial
numbers, MAC addresses, GUIDs, host names or true IP addresses: files that hold some are not read,
and GIDs, IP addresses and names made of a MAC are replaced, alike ones by alike ones.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from transfer.rails.interface_addresses import (
    ADDRESSES_FILE,
    interface_addresses,
    recorded_addresses,
)
from transfer.topology.reader import read_topology
from transfer.topology.sysfs import RecordingSysfs

RECORD_BYTES_MAX: Final = 16 << 20
_PCI: Final = "sys/bus/pci/devices/"
_GID_FILE: Final = re.compile(r".*/gids/\d+")
_NO_GID: Final = ":".join(["0000"] * 8)
# Names that udev makes of hardware addresses: enx0cc47a..., ibx..., rocex...
_NAME_OF_MAC: Final = re.compile(r"\b(en|wl|ib|roce|iw)x([0-9a-f]{12,16})")


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyRecord:
    """A recorded machine; see the module."""

    note: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    addresses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the document, one entry a line."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    def write(self, folder: Path) -> None:
        """Write the files and links out below an existing folder, to be given to `read_topology`.

        Raises:
            OSError: as of writing files.
        """
        for name in self.folders:
            (folder / name).mkdir(parents=True, exist_ok=True)
        for name, text in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")
        for name, target in self.links.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            (folder / target).mkdir(parents=True, exist_ok=True)
            path.symlink_to(os.path.relpath(folder / target, path.parent))
        table = {name: list(addresses) for name, addresses in self.addresses.items()}
        (folder / ADDRESSES_FILE).write_text(json.dumps(table), encoding="utf-8")


def record_topology(root: str | os.PathLike[str] = "/", *, note: str = "") -> TopologyRecord:
    """Record what `read_topology` reads of a machine, without what identifies it."""
    tree = RecordingSysfs(root)
    addresses = interface_addresses() if tree.root == "/" else recorded_addresses(tree)
    read_topology(sysfs=tree, addresses=addresses)
    tree.files.pop(ADDRESSES_FILE, None)
    _leave_out(tree)
    masks = _Masks()
    files = {
        masks.name(path): masks.gid(text) if _GID_FILE.fullmatch(path) else masks.name(text)
        for path, text in sorted(tree.files.items())
        if text != _NO_GID
    }
    return TopologyRecord(
        note=note,
        files=files,
        links={masks.name(path): masks.name(tree.links[path]) for path in sorted(tree.links)},
        folders=tuple(sorted(masks.name(path) for path in tree.folders)),
        addresses={
            masks.name(name): tuple(masks.address(address) for address in found)
            for name, found in sorted(addresses.items())
        },
    )


def _leave_out(tree: RecordingSysfs) -> None:
    """Drop the PCI devices of which only the vendor was looked at, and folders of what is kept."""
    for link, target in list(tree.links.items()):
        if link.startswith(_PCI) and f"{target}/class" not in tree.files:
            del tree.links[link]
            tree.files.pop(f"{target}/vendor", None)
            tree.folders.discard(target)
    kept = [*tree.files, *tree.links, *tree.links.values()]
    parents = {str(parent) for path in kept for parent in Path(path).parents}
    tree.folders -= parents | set(tree.links.values())


class _Masks:
    """Replacements of what identifies a machine; equal inputs get equal outputs."""

    def __init__(self) -> None:
        self._networks: dict[Any, int] = {}
        self._hosts: dict[Any, int] = {}
        self._gids: dict[str, int] = {}
        self._names: dict[str, int] = {}

    def name(self, text: str) -> str:
        """Number the names that are made of a hardware address."""
        return _NAME_OF_MAC.sub(
            lambda found: f"{found[1]}xm{self._names.setdefault(found[2], len(self._names))}", text
        )

    def address(self, address: str) -> str:
        """Keep family, prefix length (within what is left to number) and common networks."""
        true = ipaddress.ip_interface(address)
        if true.is_loopback:
            return address
        network = self._networks.setdefault(true.network, len(self._networks) + 1)
        host = self._hosts.setdefault(true.ip, len(self._hosts) + 1)
        if true.version == 4:
            prefix = max(true.network.prefixlen, 16)
            return f"10.{network % 256}.{host // 254 % 256}.{host % 254 + 1}/{prefix}"
        return f"fd00:{network:x}::{host:x}/{max(true.network.prefixlen, 32)}"

    def gid(self, gid: str) -> str:
        """Keep what kind of GID it is: made of an IPv4 address, link-local, or another."""
        number = self._gids.setdefault(gid, len(self._gids) + 1)
        tail = f"{number >> 16 & 0xFFFF:04x}:{number & 0xFFFF:04x}"
        if gid.startswith("0000:0000:0000:0000:0000:ffff:"):
            return f"0000:0000:0000:0000:0000:ffff:0aff:{number & 0xFFFF:04x}"
        head = "fe80" if gid.startswith("fe80:") else "fd00"
        return f"{head}:0000:0000:0000:0000:0000:{tail}"


def load_record(path: Path) -> TopologyRecord:
    """Read a record.

    Raises:
        OSError: it can't be read.
        ValueError: it is no record, or names a path outside of itself.
    """
    if path.stat().st_size > RECORD_BYTES_MAX:
        raise ValueError(f"{path}: larger than {RECORD_BYTES_MAX} bytes, no topology record")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: no topology record: {error}") from error
    try:
        if not isinstance(document, dict):
            raise TypeError(f"expected an object, seen a {type(document).__name__}")
        record = TopologyRecord(
            note=str(document.get("note", "")),
            files={str(name): str(text) for name, text in document["files"].items()},
            links={str(name): str(target) for name, target in document["links"].items()},
            folders=tuple(str(name) for name in document.get("folders", ())),
            addresses={
                str(name): tuple(str(ipaddress.ip_interface(address)) for address in found)
                for name, found in document.get("addresses", {}).items()
            },
        )
    except KeyError as error:
        raise ValueError(f"{path}: no topology record: it has no {error}") from error
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{path}: no topology record: {error}") from error
    links = record.links
    for name in (*record.files, *links, *links.values(), *record.folders):
        parts = Path(name).parts
        through = any(str(parent) in links for parent in Path(name).parents)
        if not parts or parts[0] not in ("sys", "proc") or ".." in parts or through:
            raise ValueError(f"{path}: {name!r} leads out of the record")
    return record
