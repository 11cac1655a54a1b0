"""`moe-runtime doctor topology`: NICs, GPUs, distances, and which rails each memory prefers."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from moe_runtime.topology_warnings import TopologyWarning, topology_warnings
from transfer.rails.preference import RailChoice, RailEnd, RailKind, Tier, rail_ends, rail_tiers
from transfer.topology.machine import InterfaceKind, PciPlace, RdmaDevice, RdmaPort, Topology
from transfer.topology.reader import read_topology
from transfer.topology.record import load_record, record_topology

LEGEND: Final = (
    "PIX one PCIe switch or card; PXB several bridges; PHB the root complex;",
    "NODE the same NUMA node; SYS another socket, or not known",
)
# Where the output is no terminal, nothing is wrapped below this.
FILE_COLUMNS: Final = 120
NOT_TOLD: Final = "-"


@click.command("topology")
@click.option("--json", "as_json", is_flag=True, help="All of it as one JSON document.")
@click.option(
    "--root",
    type=click.Path(exists=True, path_type=Path),
    default=Path("/"),
    help="Another machine: a record (FILE of --record), or a folder with its sys/ in it.",
)
@click.option(
    "--record",
    type=click.Path(dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="Write this machine's record, without serial numbers, MAC or IP addresses, and stop.",
)
@click.option("--include", multiple=True, metavar="PATTERN", help="Only NICs named so (mlx5_*).")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="No NICs named so.")
def topology_command(
    *,
    as_json: bool,
    root: Path,
    record: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
) -> None:
    """Show NICs, GPUs, their distances, and the rails that each memory prefers."""
    choice = RailChoice(include=include, exclude=exclude)
    try:
        with _tree(root) as folder:
            if record is not None:
                document = record_topology(folder).to_json()
                with click.open_file(record, "w", encoding="utf-8") as file:
                    file.write(document)
                return
            topology = read_topology(folder)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    warnings = topology_warnings(topology)
    if as_json:
        click.echo(json.dumps(_document(topology, choice, warnings), indent=2))
        return
    fits = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if fits else FILE_COLUMNS, highlight=False)
    with console.capture() as capture:
        _show(console, topology, choice, warnings)
    # Tables are padded to the full width, which only hurts in a file.
    click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


@contextmanager
def _tree(root: Path) -> Iterator[Path]:
    """Give the folder of a machine; a record is written out for as long as it is read."""
    if root.is_dir():
        if not (root / "sys").is_dir():
            raise ValueError(f"{root}: expected a folder with a sys/ in it, or a record")
        yield root
        return
    with tempfile.TemporaryDirectory(prefix="moe-runtime-topology-") as folder:
        load_record(root).write(Path(folder))
        yield Path(folder)


def _show(
    console: Console,
    topology: Topology,
    choice: RailChoice,
    warnings: tuple[TopologyWarning, ...],
) -> None:
    sections = [
        ("Memory", _memory(topology)),
        ("RDMA devices", _rdma(topology, choice)),
        ("Network interfaces", _interfaces(topology)),
        ("Distance of GPUs and NICs", _matrix(topology, choice)),
        ("Rails by preference", _preferences(topology, choice)),
    ]
    for title, table in sections:
        if table.row_count:
            console.print(Text(title, style="bold"))
            console.print(Padding(table, (0, 0, 1, 2)))
        if title.startswith("Distance") and table.row_count:
            for line in LEGEND:
                console.print(Text(f"  {line}", style="dim"))
            console.print()
    if not topology.gpus:
        console.print("No GPUs.\n")
    if not rail_ends(topology, choice=choice):
        console.print(f"No rails: {_why_no_rails(topology)}.\n", markup=False)
    if warnings:
        console.print(Text("Warnings", style="bold"))
    for warning in warnings:
        found = Text.assemble((warning.device, "yellow"), f": {warning.problem}")
        console.print(Padding(found, (0, 0, 0, 2)))
        console.print(Padding(Text(f"-> {warning.remedy}"), (0, 0, 0, 6)))


def _why_no_rails(topology: Topology) -> str:
    there_are = [end.name for end in rail_ends(topology)]
    if not there_are:
        return "no RDMA device, and no interface with an address"
    return f"--include and --exclude leave none of {', '.join(there_are)}"


def _table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="underline")
    for name in columns:
        justify: Any = "right" if name in right else "left"
        table.add_column(name, justify=justify, overflow="fold")
    return table


def _memory(topology: Topology) -> Table:
    table = _table("location", "NUMA", "PCI", "lanes", "what", right=("NUMA",))
    for node in topology.nodes:
        table.add_row(node.location, str(node.number), "", "", f"cpus {node.cpus or NOT_TOLD}")
    for gpu in topology.gpus:
        table.add_row(
            gpu.location or NOT_TOLD, _number(gpu.place.numa_node), gpu.place.address,
            _lanes(gpu.place), gpu.model or f"{gpu.vendor} GPU",
        )  # fmt: skip
    return table


def _rdma(topology: Topology, choice: RailChoice) -> Table:
    ends = {end.name: end for end in rail_ends(topology, kind=RailKind.RDMA, choice=choice)}
    table = _table(
        "device", "state", "Gb/s", "layer", "NUMA", "lanes", "interface", "addresses",
        right=("Gb/s", "NUMA"),
    )  # fmt: skip
    for device in topology.rdma:
        for port in device.ports:
            _rdma_row(table, device, port, ends)
    return table


def _rdma_row(table: Table, device: RdmaDevice, port: RdmaPort, ends: dict[str, RailEnd]) -> None:
    name = device.name if len(device.ports) == 1 else f"{device.name}:{port.number}"
    end = ends.get(name)
    layer = {"Ethernet": "RoCE", "InfiniBand": "IB"}.get(port.link_layer, port.link_layer)
    table.add_row(
        name,
        _state(port.state if end else "excluded", good=port.up and end is not None),
        _number(end.gbps if end else port.gbps),
        layer or NOT_TOLD,
        _number(device.place.numa_node),
        _lanes(device.place),
        "\n".join(port.interfaces) or NOT_TOLD,
        "\n".join(end.addresses if end else ()) or NOT_TOLD,
    )


def _interfaces(topology: Topology) -> Table:
    table = _table(
        "interface", "kind", "state", "Gb/s", "MTU", "NUMA", "addresses",
        right=("Gb/s", "MTU", "NUMA"),
    )  # fmt: skip
    for item in topology.interfaces:
        if item.kind is InterfaceKind.LOOPBACK:
            continue
        if item.kind is InterfaceKind.VIRTUAL and not item.addresses:
            continue
        state = "no carrier" if item.carrier is False else item.state or "unknown"
        kind = f"in {item.master}" if item.master else str(item.kind)
        table.add_row(
            item.name, kind, _state(state, good=item.up), _number(item.gbps), _number(item.mtu),
            _number(item.place.numa_node), "\n".join(item.addresses) or NOT_TOLD,
        )  # fmt: skip
    return table


def _matrix(topology: Topology, choice: RailChoice) -> Table:
    """One line a NIC and one column a GPU: hosts have at most eight or sixteen GPUs."""
    ends = rail_ends(topology, choice=choice)
    table = _table("", *(gpu.location or gpu.place.address for gpu in topology.gpus))
    for end in ends if topology.gpus else ():
        told = [topology.distance(end.place, gpu.place).name for gpu in topology.gpus]
        table.add_row(end.name, *told)
    return table


def _preferences(topology: Topology, choice: RailChoice) -> Table:
    table = _table("location", "distance", "rails, the first choice first")
    for location in topology.locations:
        for i, tier in enumerate(rail_tiers(topology, location, choice=choice)):
            distance = "fallback" if tier.fallback else tier.distance.name
            table.add_row(location if i == 0 else "", distance, "  ".join(tier.rails))
    return table


def _state(state: str, *, good: bool) -> Text:
    return Text(state or "unknown", style="green" if good else "red")


def _number(value: float | None) -> str:
    return NOT_TOLD if value is None else f"{value:g}"


def _lanes(place: PciPlace) -> str:
    """Lanes and their speed, as x16 32.0."""
    if not place.link_width:
        return NOT_TOLD
    return f"x{place.link_width}" + (f" {place.link_gts:g}" if place.link_gts else "")


def _document(
    topology: Topology, choice: RailChoice, warnings: tuple[TopologyWarning, ...]
) -> dict[str, Any]:
    """All that the tables show, and what they leave out."""
    ends = rail_ends(topology, choice=choice)
    return {
        **dataclasses.asdict(topology),
        "rails": [dataclasses.asdict(end) for end in ends],
        "distances": {
            gpu.location or gpu.place.address: {
                end.name: topology.distance(end.place, gpu.place).name for end in ends
            }
            for gpu in topology.gpus
        },
        "preferences": {
            location: [_tier(tier) for tier in rail_tiers(topology, location, choice=choice)]
            for location in topology.locations
        },
        "warnings": [dataclasses.asdict(warning) for warning in warnings],
    }


def _tier(tier: Tier) -> dict[str, Any]:
    return {"distance": tier.distance.name, "rails": tier.rails, "fallback": tier.fallback}
