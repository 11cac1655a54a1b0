"""`moe-runtime bench`: how fast it is here."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moe_runtime.bench.workload import Case, parse_size, shown_size
from moe_runtime.options import NumberRange

if TYPE_CHECKING:
    from moe_runtime.bench.measuring import Measurement
    from moe_runtime.bench.session import Setup

PRIORITIES = ("activations", "kv_get", "kv_put", "weights", "migration")
BACKENDS = ("auto", "shared_memory", "tcp", "verbs", "local", "file")
DEFAULT_SIZES = "4K,64K,1M,16M"
BLOCKS_MAX = 1 << 20
BATCH_MAX = 4096
#: of the machine's memory, for both windows together
MEMORY_SHARE = 0.5


class Sizes(click.ParamType[list[int]]):
    """A comma list of sizes."""

    name = "SIZE[,SIZE...]"

    def convert(self, value: Any, param: Any, ctx: Any) -> list[int]:
        """Parse each, or fail with the one that is wrong."""
        if isinstance(value, list):
            return value
        try:
            return [parse_size(word) for word in str(value).split(",")]
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Cores(click.ParamType[tuple[int, ...]]):
    """A comma list of core numbers that this process may use."""

    name = "CORE[,CORE...]"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        """Parse and compare with the cores that there are."""
        import os

        usable = os.sched_getaffinity(0)
        words = str(value).split(",")
        if not all(word.strip().isdecimal() for word in words):
            self.fail(f"{value!r} is not a list of core numbers", param, ctx)
        cores = tuple(sorted({int(word) for word in words}))
        if not usable.issuperset(cores):
            shown = ",".join(map(str, sorted(usable)))
            self.fail(f"{value!r}: usable cores are {shown}", param, ctx)
        return cores


@click.group("bench")
def bench_command() -> None:
    """Measure this machine."""


@bench_command.command("transfer")
@click.option("--backend", type=click.Choice(BACKENDS), default="auto", show_default=True)
@click.option("--op", type=click.Choice(["write", "read", "both"]), default="both",
              show_default=True)  # fmt: skip
@click.option("--sizes", type=Sizes(), default=DEFAULT_SIZES, show_default=True,
              help="Bytes of a piece: 4096, 64K, 1M, 1G.")  # fmt: skip
@click.option("--blocks", type=click.IntRange(1, BLOCKS_MAX), default=1, show_default=True,
              help="Scattered pieces per operation.")  # fmt: skip
@click.option("--batch", type=click.IntRange(1, BATCH_MAX), default=1, show_default=True,
              help="Operations in flight.")  # fmt: skip
@click.option("--seconds", type=NumberRange(0.01, 3600), default=1.0, show_default=True,
              help="Time per row.")  # fmt: skip
@click.option("--rails", default="", metavar="ADDRESS[,ADDRESS...]",
              help="Local addresses to spread over.")  # fmt: skip
@click.option("--connections", type=click.IntRange(1, 16), help="Data connections per tcp peer.")
@click.option("--priority", type=click.Choice(PRIORITIES), help="Class of the operations.")
@click.option("--prepared/--no-prepared", default=False, show_default=True,
              help="Prepare each operation once, only post it while the clock runs.")  # fmt: skip
@click.option("--private", is_flag=True,
              help="The target's memory is ordinary memory, which no process can map.")  # fmt: skip
@click.option("--pin", type=Cores(), help="Cores that both sides may use.")
@click.option("--check/--no-check", default=True, show_default=True,
              help="Compare bytes after each row.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="JSON lines instead of the table.")
@click.option("--serve", is_flag=True, help="Be the target: print an address, answer for ever.")
@click.option("--connect", metavar="HOST:PORT", help="Measure against a `--serve` elsewhere.")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False, exists=True),
              help="Where backend file makes its slab.")  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--secret-file", type=click.Path(path_type=Path, dir_okay=False),
              help="Shared by both sides; or MOE_RUNTIME_SECRET in the environment.")  # fmt: skip
def transfer_command(**options: Any) -> None:
    """Measure the transfer engine between two processes, or two hosts.

    Starts its own target unless --connect names one. docs/bench-transfer.md explains the columns.
    """
    _check_together(options)
    from moe_runtime.bench.session import secret_from
    from moe_runtime.options import failures_in_one_line

    with failures_in_one_line():
        secret = secret_from(options["secret_file"])
        if secret is None and (options["serve"] or options["connect"]):
            raise click.UsageError("two hosts need --secret-file, or MOE_RUNTIME_SECRET")
        setup = _setup(options, secret)
        if options["serve"]:
            _serve(setup)
        else:
            _measure(setup, _cases(options), options["seconds"], as_json=options["as_json"])


def _check_together(options: dict[str, Any]) -> None:
    """Refuse what makes no sense together, before anything is imported or started."""
    if options["serve"] and options["connect"]:
        raise click.UsageError("--serve and --connect are the two ends: give one of them")
    alone = options["backend"] in ("local", "file")
    if alone and (options["serve"] or options["connect"]):
        raise click.UsageError(f"backend {options['backend']} has no other end")
    if (options["backend"] == "file") != (options["folder"] is not None):
        raise click.UsageError("--backend file and --folder belong together")
    if options["backend"] == "file" and (options["prepared"] or options["priority"]):
        raise click.UsageError("backend file knows neither --prepared nor --priority")
    if options["connect"] and not options["connect"].rpartition(":")[2].isdecimal():
        raise click.UsageError(f"--connect {options['connect']!r} is not HOST:PORT")


def _setup(options: dict[str, Any], secret: bytes | None) -> Setup:
    from pydantic import ValidationError

    from moe_runtime.bench.session import Setup

    setup = Setup(
        backend=options["backend"],
        host=options["host"],
        rails=tuple(word.strip() for word in options["rails"].split(",") if word.strip()),
        connections=options["connections"],
        priority=options["priority"],
        prepared=options["prepared"],
        private=options["private"],
        cores=options["pin"],
        connect=options["connect"],
        folder=options["folder"],
        secret=secret,
        check=options["check"],
    )
    try:
        setup.config()
    except ValidationError as error:
        raise click.UsageError("; ".join(item["msg"] for item in error.errors())) from error
    return setup


def _cases(options: dict[str, Any]) -> list[Case]:
    import os

    operations = ["write", "read"] if options["op"] == "both" else [options["op"]]
    cases = [
        Case(operation=operation, size=size, blocks=options["blocks"], batch=options["batch"])
        for size in options["sizes"]
        for operation in operations
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed = 2 * max(case.window_bytes for case in cases)
    if needed > MEMORY_SHARE * memory:
        raise click.UsageError(
            f"sizes, blocks and batch need {needed / 2**30:.1f} GiB on both sides together, "
            f"of {memory / 2**30:.1f} GiB here"
        )
    return cases


def _measure(setup: Setup, cases: list[Case], seconds: float, *, as_json: bool) -> None:
    from moe_runtime.bench import report
    from moe_runtime.bench.session import measuring
    from moe_runtime.bench.usage import quiet_check

    if (busy := quiet_check()) > report.OTHER_CORES_MAX:
        click.echo(f"warning: others use {busy:.1f} cores; the figures will suffer", err=True)
    rows: list[Measurement] = []
    try:
        with measuring(setup, cases) as measurer, report.progress(len(cases)) as show:
            if as_json:
                sys.stdout.write(report.json_line(report.header()))
            for i, case in enumerate(cases):
                what = f"{case.operation} {case.blocks} x {shown_size(case.size)}"
                row = measurer.measure(case, seconds, partial(show, what, i))
                rows.append(row)
                if as_json:
                    sys.stdout.write(report.json_line({"figure": "transfer", **row.rounded()}))
                    sys.stdout.flush()
    finally:  # interrupted, or failed at a later row: what was measured was measured
        if rows and not as_json:
            report.print_table(rows)
    disturbed = sum(row.other_cores > report.OTHER_CORES_MAX for row in rows)
    if disturbed:
        click.echo(f"warning: {disturbed} of {len(rows)} rows were measured beside other work",
                   err=True)  # fmt: skip


def _serve(setup: Setup) -> None:
    from moe_runtime.bench.target import serving
    from moe_runtime.bench.usage import pin

    assert setup.secret is not None
    if setup.cores is not None:
        pin(setup.cores)
    with serving(setup.config(), setup.secret) as service:
        click.echo(service.engine.address)
        sys.stdout.flush()
        try:
            service.run(until_left=False)
        except KeyboardInterrupt:
            click.echo("stopped", err=True)
