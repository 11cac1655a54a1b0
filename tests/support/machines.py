"""Machines to look at: recorded trees of tests/data/topology, written out below a folder."""

from __future__ import annotations

from pathlib import Path

from transfer.topology.machine import Topology
from transfer.topology.reader import read_topology
from transfer.topology.record import load_record

RECORDS = Path(__file__).parents[1] / "data/topology"
NAMES = tuple(sorted(path.stem for path in RECORDS.glob("*.json")))


def write_machine(name: str, folder: Path) -> Path:
    """Write a recorded machine out; return where its root is."""
    root = folder / name
    root.mkdir()
    load_record(RECORDS / f"{name}.json").write(root)
    return root


def machine(name: str, folder: Path) -> Topology:
    """Read a recorded machine."""
    return read_topology(write_machine(name, folder))
