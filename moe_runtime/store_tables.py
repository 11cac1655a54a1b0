"""What `moe-runtime store` shows people: lines, tables and a progress bar on stderr."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.admin.reports import (
        BlockPage,
        DrainReport,
        PoolReport,
        TenantPage,
        VerifyReport,
        WriterPage,
    )

_NUMERIC = "right"
_WIDEST = 10_000  # of a table, before it is asked whether it fits


def show(console: Console, table: Table) -> None:
    """Print a table; where it is wider than the terminal, each row as lines of name and value."""
    unbounded = console.options.update(width=_WIDEST)
    if console.measure(table, options=unbounded).maximum <= console.width:
        console.print(table)
        return
    names = [str(column.header) for column in table.columns]
    margin = max(map(len, names))
    for row in zip(*(column.cells for column in table.columns), strict=True):
        for name, value in zip(names, row, strict=True):
            if value:
                console.print(f"{name:>{margin}}  {value}", soft_wrap=True, highlight=False)
        console.print()


def shown_bytes(nbytes: float) -> str:
    """Return a number of bytes with three digits and a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.3g} {unit}" if unit != "B" else f"{nbytes:.0f} B"
        nbytes /= 1024
    return f"{nbytes:.3g} TiB"


def headline(report: PoolReport) -> str:
    """One line: can it be used, how full is it, how often does it hit."""
    away = [master for master in report.masters if master.problem is not None]
    totals = report.totals
    if away:
        state = f"NOT ready: {len(away)} of {len(report.masters)} masters do not answer"
    elif not report.segments:
        state = "NOT ready: no node lends memory"
    else:
        state = "ready"
    capacity, free = totals.get("capacity_bytes", 0), totals.get("free_bytes", 0)
    hits, missed = totals.get("hit_blocks", 0), totals.get("missed_blocks", 0)
    rate = f"{hits / (hits + missed):.1%} hits" if hits + missed else "nothing looked up yet"
    return (
        f"{state}; {totals.get('nodes', 0)} nodes, {totals.get('blocks', 0)} blocks, "
        f"{shown_bytes(capacity - free)} of {shown_bytes(capacity)} used, {rate}"
    )


def master_table(report: PoolReport) -> Table:
    """One row per master."""
    table = _table(
        ("master", ""),
        *((name, _NUMERIC) for name in ("blocks", "leases", "open puts", "stored", "evicted")),
        ("no space", _NUMERIC),
        *((name, _NUMERIC) for name in ("corrupt", "lost", "quarantined")),
        ("problem", ""),
    )
    names = (
        *("blocks", "leases", "open_puts", "stored_blocks", "evicted_blocks", "no_space_blocks"),
        *("corrupt_blocks", "lost_blocks"),
    )
    for master in report.masters:
        figures = [str(master.figures.get(name, "-")) for name in names]
        quarantined = master.figures.get("quarantined_bytes")
        table.add_row(
            master.address,
            *figures,
            "-" if quarantined is None else shown_bytes(quarantined),
            master.problem or "",
        )
    return table


def segment_table(report: PoolReport) -> Table:
    """One row per segment."""
    table = _table(
        ("node", ""),
        ("segment", _NUMERIC),
        ("medium", ""),
        ("domain", ""),
        *((name, _NUMERIC) for name in ("blocks", "used", "capacity", "largest hole", "silent")),
        ("state", ""),
    )
    for row in report.segments:
        table.add_row(
            row.node,
            str(row.segment),
            row.medium,
            row.domain or "-",
            str(row.blocks),
            shown_bytes(row.capacity_bytes - row.free_bytes),
            shown_bytes(row.capacity_bytes),
            shown_bytes(row.largest_free_bytes),
            f"{row.silent_s:.1f} s",
            "draining" if row.draining else "",
        )
    return table


def block_table(page: BlockPage, *, with_header: bool) -> Table:
    """One row per block."""
    table = _table(
        ("key", ""), ("bytes", _NUMERIC), ("pin", ""), ("tenant", ""), ("group", ""), ("copies", "")
    )
    table.show_header = with_header
    for block in page.blocks:
        copies = (f"{copy.node}/{copy.segment} ({copy.medium})" for copy in block.copies)
        table.add_row(
            block.key,
            str(block.nbytes),
            f"{block.pin}{', leased' if block.leased else ''}",
            block.tenant or "-",
            _printable(block.group) or "-",
            ", ".join(copies),
        )
    return table


def tenant_table(page: TenantPage) -> Table:
    """One row per tenant."""
    table = _table(("tenant", ""), *((name, _NUMERIC) for name in ("blocks", "used", "quota")))
    for row in page.tenants:
        quota = "none" if row.quota_bytes is None else shown_bytes(row.quota_bytes)
        table.add_row(row.tenant or "-", str(row.blocks), shown_bytes(row.used_bytes), quota)
    return table


def writer_table(page: WriterPage) -> Table:
    """One row per writer."""
    table = _table(("writer", ""), *((name, _NUMERIC) for name in ("open", "quarantined")))
    for row in page.writers:
        table.add_row(row.writer, shown_bytes(row.open_bytes), shown_bytes(row.quarantined_bytes))
    return table


def bad_table(report: VerifyReport) -> Table:
    """One row per bad copy."""
    table = _table(("key", ""), ("node", ""), ("segment", _NUMERIC), ("offset", _NUMERIC),
                   ("problem", ""))  # fmt: skip
    for bad in report.bad:
        table.add_row(bad.key, bad.node, str(bad.segment), str(bad.offset), bad.problem)
    return table


def verify_line(report: VerifyReport) -> str:
    """One line: how a verification ended."""
    line = (
        f"{report.state}: {report.checked_copies} copies, {shown_bytes(report.checked_bytes)} "
        f"verified; {report.bad_copies} bad; {report.gone_copies} went while they were read"
    )
    return line if report.problem is None else f"{line}; {report.problem}"


def drain_line(node: str, report: DrainReport, *, cancelled: bool) -> str:
    """How far a drain is: one line if it is over, and else what is left, and why."""
    from kvstore.admin.reports import DrainState  # here: `--help` does without

    if cancelled or report.state is DrainState.CANCELLED:
        return f"{node} is not drained any more; {report.left_blocks} blocks are there"
    if not report.left_blocks:
        return f"{node} is empty; {report.moved_blocks} blocks were moved"
    stuck = f", {report.stuck_blocks} of them with nowhere to go" if report.stuck_blocks else ""
    left = f"{report.left_blocks} blocks ({shown_bytes(report.left_bytes)}) left{stuck}"
    lines = [f"{node}: {left}; {report.moved_blocks} were moved"]
    if report.problem is not None:
        lines += [f"  {reason}" for reason in report.problem.split("; ")]
    if report.no_domain_blocks:
        lines.append("  --fewer-copies would drop these copies: one is elsewhere")
    lines.append("The drain goes on: store drain shows how far it is, --cancel ends it.")
    return "\n".join(lines)


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show progress on stderr, if that is a terminal; yields `advance(done, total)`."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=max(done, total))


def _printable(name: str) -> str:
    """Return what a client called something, without what would steer the terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in name)


def _table(*columns: tuple[str, str]) -> Table:
    table = Table()
    for name, justify in columns:
        table.add_column(name, justify="right" if justify else "left", overflow="fold")
    return table
