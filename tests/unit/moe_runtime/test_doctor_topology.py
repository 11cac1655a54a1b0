"""`moe-runtime doctor topology`: what a user sees of each recorded machine, and of this one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from moe_runtime.cli import main
from moe_runtime.topology_warnings import topology_warnings
from tests.support.machines import NAMES, RECORDS, machine, write_machine
from transfer.topology.reader import read_topology


def doctor(*arguments: str, columns: int | None = None) -> Result:
    runner = CliRunner(env={"COLUMNS": None if columns is None else str(columns)})
    return runner.invoke(main, ["doctor", "topology", *arguments])


def shown(name: str, *arguments: str, columns: int | None = None) -> str:
    result = doctor("--root", str(RECORDS / f"{name}.json"), *arguments, columns=columns)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def said(name: str, folder: Path) -> dict[str, str]:
    return {
        w.device: f"{w.problem} -> {w.remedy}" for w in topology_warnings(machine(name, folder))
    }


@pytest.mark.parametrize("columns", [80, None])
@pytest.mark.parametrize("name", NAMES)
def test_every_machine_fits_and_keeps_its_names_whole(name: str, columns: int | None) -> None:
    text = shown(name, columns=columns)
    lines = text.splitlines()
    assert max(map(len, lines)) <= (columns or 120)
    assert not any(line != line.rstrip() for line in lines)
    assert "\x1b" not in text  # a file gets no colours
    document = json.loads(shown(name, "--json"))
    for rail in document["rails"]:
        assert rail["name"] in text
    for location in document["preferences"]:
        assert location in text


def test_the_tables_say_what_the_machine_is() -> None:
    text = shown("two_sockets_8_gpus_8_nics")
    assert "  cuda:5       1  0000:c3:00.0  x16 32  NVIDIA H100 80GB HBM3" in text
    assert "  mlx5_9   ACTIVE   400  IB        1  x16 32  ibp192s0       10.15.0.5/24" in text
    assert "  mlx5_9   SYS     SYS     SYS     SYS     NODE    PXB     NODE    NODE" in text
    assert "  cuda:5    PXB       mlx5_9\n            NODE      mlx5_6  mlx5_10  mlx5_11" in text
    assert "NODE the same NUMA node" in text
    assert "  mlx5_1, mlx5_2, mlx5_7, mlx5_8: port is DOWN\n      -> check cable" in text


def test_the_json_has_all_of_it() -> None:
    document = json.loads(shown("bonded_nics", "--json"))
    assert document["distances"]["cuda:2"] == {
        "mlx5_bond_0": "NODE", "mlx5_bond_1": "PIX", "mlx5_bond_2": "SYS", "mlx5_bond_3": "SYS",
    }  # fmt: skip
    assert document["preferences"]["cuda:2"][0] == {
        "distance": "PIX", "rails": ["mlx5_bond_1"], "fallback": False,
    }  # fmt: skip
    assert document["rdma"][0]["ports"][0]["gids"][3]["kind"] == "RoCE v2"
    assert {w["device"] for w in document["warnings"]} == {
        "mlx5_bond_1", "mlx5_bond_2", "bond3", "IOMMU",
    }  # fmt: skip


def test_patterns_choose_what_is_preferred() -> None:
    text = shown("two_sockets_8_gpus_8_nics", "--include", "mlx5_*", "--exclude", "mlx5_9")
    assert "  mlx5_9   excluded" in text
    preferences = text.partition("Rails by preference")[2].partition("Warnings")[0]
    assert "mlx5_9" not in preferences
    assert "mlx5_6" in preferences


def test_warnings_of_bonds_links_mtu_and_iommu(tmp_path: Path) -> None:
    told = said("bonded_nics", tmp_path)
    assert "16 GT/s of 32" in told["mlx5_bond_1"]
    assert "MTU of 1500: packets of 1024 bytes" in told["mlx5_bond_2"]
    assert "ip link set bond2 mtu 9000" in told["mlx5_bond_2"]
    assert "bond without ens13f1np1" in told["bond3"]
    assert "cuda:0 from mlx5_bond_0, cuda:2 from mlx5_bond_1" in told["IOMMU"]


def test_warnings_of_devices_that_are_down(tmp_path: Path) -> None:
    told = said("devices_down", tmp_path)
    assert told["mlx5_1"].startswith("port is DOWN")
    assert told["mlx5_2"].endswith("is its interface up?")
    assert "no carrier" in told["eth1"]
    layer = tmp_path / "devices_down/sys/class/infiniband/mlx5_2/ports/1/link_layer"
    layer.write_text("InfiniBand")
    both = topology_warnings(read_topology(tmp_path / "devices_down"))
    assert any("is a subnet manager running?" in w.remedy for w in both)
    assert {w.problem for w in both if w.device == "mlx5_3"} == {
        "PCIe link x4 of x16",
        "RoCE over eth3 with an MTU of 1500: packets of 1024 bytes",
        "network 100 Gb/s, its PCIe link only 63",
    }


def test_a_nic_on_the_other_socket_than_every_gpu(tmp_path: Path) -> None:
    root = write_machine("two_sockets_8_gpus_8_nics", tmp_path)
    for address in ("1b", "43", "52", "61"):  # the first socket's GPUs are taken out
        (root / f"sys/bus/pci/devices/0000:{address}:00.0").unlink()
        (root / f"proc/driver/nvidia/gpus/0000:{address}:00.0/information").unlink()
        (root / f"proc/driver/nvidia/gpus/0000:{address}:00.0").rmdir()
    found = {w.problem: w.device for w in topology_warnings(read_topology(root))}
    assert found["on NUMA node 0, every GPU is on another one"] == "mlx5_0, mlx5_3, mlx5_4, mlx5_5"


def test_a_gpu_without_a_nic_on_its_socket(tmp_path: Path) -> None:
    root = write_machine("two_sockets_8_gpus_8_nics", tmp_path)
    for number in (6, 7, 8, 9, 10, 11):
        (root / f"sys/class/infiniband/mlx5_{number}/ports/1/state").write_text("1: DOWN")
    found = {w.problem: w.device for w in topology_warnings(read_topology(root))}
    assert found["every RDMA device that is up is on another socket"] == (
        "cuda:4, cuda:5, cuda:6, cuda:7"
    )


def test_a_quiet_machine_has_no_warnings(tmp_path: Path) -> None:
    assert said("cloud_one_nic", tmp_path) == {}
    text = shown("cloud_one_nic")
    assert "No GPUs." in text
    assert "Warnings" not in text


def test_this_machine_is_shown_and_recorded(tmp_path: Path) -> None:
    assert doctor().exit_code == 0
    record = tmp_path / "mine.json"
    assert doctor("--record", str(record)).exit_code == 0
    assert set(json.loads(record.read_text())) == {"note", "files", "links", "folders", "addresses"}
    mine, recorded = (
        json.loads(doctor("--json", *arguments).stdout)
        for arguments in ((), ("--root", str(record)))
    )
    assert mine["preferences"] == recorded["preferences"]
    assert mine["nodes"] == recorded["nodes"]


def test_a_folder_will_do_and_what_is_none_is_told(tmp_path: Path) -> None:
    root = write_machine("cloud_one_nic", tmp_path)
    assert "ens5" in doctor("--root", str(root)).stdout
    assert doctor("--root", str(tmp_path / "nowhere")).exit_code == 2
    (tmp_path / "text").write_text("{}")
    refused = doctor("--root", str(tmp_path / "text"))
    assert refused.exit_code == 1
    assert "no topology record" in refused.stderr
    assert "Traceback" not in refused.output


def test_doctor_alone_still_examines_and_knows_its_subcommand() -> None:
    result = CliRunner().invoke(main, ["doctor", "--help"])
    assert "topology" in result.output
    assert CliRunner().invoke(main, ["doctor", "nothing"]).exit_code == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [("{", "Expecting property name"), ("[]", "expected an object, seen a list"),
     ('{"a": 1}', "it has no 'files'"), ('{"files": 1, "links": 2}', "no topology record")],
)  # fmt: skip
def test_what_is_no_record_says_which_file_and_why(tmp_path, text, problem):
    file = tmp_path / "record.json"
    file.write_text(text)
    result = CliRunner().invoke(main, ["doctor", "topology", "--root", str(file)])
    assert result.exit_code == 1
    assert str(file) in result.stderr
    assert problem in result.stderr


def test_a_folder_of_something_else_is_no_machine(tmp_path):
    result = CliRunner().invoke(main, ["doctor", "topology", "--root", str(tmp_path)])
    assert result.exit_code == 1
    assert "a folder with a sys/ in it" in result.stderr


def test_a_choice_that_leaves_nothing_is_named():
    result = CliRunner().invoke(main, ["doctor", "topology", "--include", "no-such-*"])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    (line,) = [line for line in lines if line.startswith("No rails")] or [""]
    assert "--include" in line or "no RDMA device" in line
