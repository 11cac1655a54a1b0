"""A record gives the same reading as the machine, and says nothing that identifies it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.machines import NAMES, RECORDS, write_machine
from transfer.topology.machine import Topology
from transfer.topology.reader import read_topology
from transfer.topology.record import TopologyRecord, load_record, record_topology

MAC = "0c:42:a1:e8:87:8c"


def anonymous(topology: Topology) -> Topology:
    """Without what a record replaces."""
    return replace(
        topology,
        interfaces=tuple(replace(item, addresses=()) for item in topology.interfaces),
        rdma=tuple(
            replace(
                device,
                ports=tuple(
                    replace(port, gids=tuple(replace(gid, gid="") for gid in port.gids))
                    for port in device.ports
                ),
            )
            for device in topology.rdma
        ),
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_record_reads_as_the_machine_does(name: str, tmp_path: Path) -> None:
    root = write_machine(name, tmp_path)
    record = record_topology(root, note="a copy")
    (tmp_path / "copy.json").write_text(record.to_json())
    loaded = load_record(tmp_path / "copy.json")
    assert loaded == record
    copy = tmp_path / "copy"
    copy.mkdir()
    loaded.write(copy)
    assert anonymous(read_topology(copy)) == anonymous(read_topology(root))
    # What is recorded of a record is the same again: nothing more is replaced or left out.
    again = record_topology(copy, note="a copy")
    assert (again.files.keys(), again.links) == (record.files.keys(), record.links)


def test_this_machine_can_be_recorded(tmp_path: Path) -> None:
    record_topology().write(tmp_path)
    assert anonymous(read_topology(tmp_path)) == anonymous(read_topology())


def test_nothing_in_a_record_identifies_the_machine(tmp_path: Path) -> None:
    root = write_machine("devices_down", tmp_path)
    (root / "sys/class/net/eth0/address").write_text(MAC)
    (root / "sys/class/infiniband/mlx5_0/node_guid").write_text("0c42:a103:00e8:878c")
    (root / "sys/class/infiniband/mlx5_0/ports/1/gids/0").write_text(
        "fe80:0000:0000:0000:0e42:a1ff:fee8:878c"
    )
    information = root / "proc/driver/nvidia/gpus/0000:83:00.0"
    information.mkdir(parents=True)
    (information / "information").write_text(
        "Model: \t\t GPU of a kind\nGPU UUID: \t GPU-5cc3\nSerial: \t 1234567\n"
    )
    real = (root / "sys/class/net/eth3").resolve()
    (root / "sys/class/net/eth3").unlink()
    named = real.rename(real.parent / "enx0c42a1e8878c")
    (root / "sys/class/net/enx0c42a1e8878c").symlink_to(named)
    text = record_topology(root).to_json().lower()
    for secret in (MAC, "0c42a1", "878c", "gpu-5cc3", "1234567", "192.168.7.2", "10.30.0.2"):
        assert secret not in text, secret
    assert "gpu of a kind" in text
    assert '"sys/class/net/enxm0"' in text


def test_equal_addresses_stay_equal_and_networks_stay_networks(tmp_path: Path) -> None:
    root = write_machine("cloud_one_nic", tmp_path)
    table = {"ens5": ["192.0.2.7/24"], "docker0": ["192.0.2.9/24", "198.51.100.7/24"]}
    (root / "addresses.json").write_text(json.dumps(table))
    found = record_topology(root).addresses
    first, second, third = (*found["ens5"], *found["docker0"])
    assert first != second
    assert first.rpartition(".")[0] == second.rpartition(".")[0] != third.rpartition(".")[0]


@pytest.mark.parametrize(
    "document",
    [
        "[]",
        "{}",
        '{"files": [], "links": {}}',
        '{"files": {"../x": ""}, "links": {}}',
        '{"files": {"/etc/passwd": ""}, "links": {}}',
        '{"files": {"etc/x": ""}, "links": {}}',
        '{"files": {}, "links": {"sys/a": "../../x"}}',
        '{"files": {"sys/a/b": ""}, "links": {"sys/a": "sys/c"}}',
        '{"files": {}, "links": {}, "folders": [".."]}',
        '{"files": {}, "links": {}, "addresses": {"eth0": ["nowhere"]}}',
        "not json",
    ],
)
def test_what_is_no_record_is_refused(document: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(document)
    with pytest.raises(ValueError, match=r"."):
        load_record(path)


@pytest.mark.parametrize("name", NAMES)
def test_kept_records_say_what_they_are_and_hold_no_hardware_address(name: str) -> None:
    record = load_record(RECORDS / f"{name}.json")
    assert re.search(r"[Rr]econstructed|Made up", record.note)
    assert not re.search(r"([0-9a-f]{2}:){5}[0-9a-f]{2}", "\n".join(record.files.values()))


def test_an_empty_record_is_an_empty_machine(tmp_path: Path) -> None:
    TopologyRecord().write(tmp_path)
    assert read_topology(tmp_path).locations == ("cpu:0",)
