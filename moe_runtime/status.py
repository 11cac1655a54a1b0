"""`moe-runtime status`: view, members and load of a running server, as a table."""

from __future__ import annotations

import json
from typing import Any

import click
import httpx
from rich.console import Console
from rich.table import Table

TIMEOUT_S = 10.0


def read_status(url: str) -> dict[str, Any]:
    """Ask a front for its /status.

    Raises:
        click.ClickException: Nobody answers there, or not a front.
    """
    where = f"{url.rstrip('/')}/status"
    try:
        answer = httpx.get(where, timeout=TIMEOUT_S).raise_for_status().json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        detail = " ".join(str(error).split()) or type(error).__name__
        raise click.ClickException(f"no answer from {where}: {detail}") from error
    except ValueError as error:
        raise click.ClickException(f"{where} is not a moe-runtime front: no JSON") from error
    if not isinstance(answer, dict) or not {"epoch", "members", "healthy"} <= answer.keys():
        raise click.ClickException(f"{where} is not a moe-runtime front: another kind of answer")
    return answer


def headline(status: dict[str, Any]) -> str:
    """One line: what is served, and whether it works."""
    health = "healthy" if status["healthy"] else f"NOT healthy: {status['unhealthy_reason']}"
    if status["draining"]:
        health = f"draining, {health}"
    return (
        f"{status['model']}: {health}; view {status['epoch']}, {len(status['members'])} members, "
        f"{status['open_requests']} open requests, {status['queued_requests']} of them queued"
    )


def member_table(members: list[dict[str, Any]]) -> Table:
    """One row per member of the view."""
    table = Table()
    for name in ("rank", "incarnation", "role", "node", "pid", "requests", "KV pages", "tokens"):
        numeric = name in ("rank", "pid", "requests", "KV pages", "tokens")
        table.add_column(name, justify="right" if numeric else "left")
    for member in members:
        free, total = member["free_pages"], member["num_pages"]
        generated = member["counters"].get("tokens_generated", 0)
        table.add_row(
            _shown(member["rank"]),
            member["incarnation"],
            _shown(member["role"]) if member["said_hello"] else "joining",
            _shown(member["node"]),
            _shown(member["pid"]),
            str(member["open_requests"]),
            "-" if total is None or free is None else f"{total - free}/{total}",
            f"{generated:.0f}",
        )
    return table


def _shown(value: object) -> str:
    return "-" if value is None else str(value)


@click.command("status")
@click.argument("url", default="http://127.0.0.1:8000")
@click.option("--json", "as_json", is_flag=True, help="Print the server's answer as it is.")
def status_command(url: str, as_json: bool) -> None:
    """Show view, members and load of the server at URL (default: this machine, port 8000).

    The exit status is 0 if generation works there, 1 if not or if nobody answers.
    """
    status = read_status(url if "://" in url else f"http://{url}")
    if as_json:
        click.echo(json.dumps(status, indent=2))
    else:
        click.echo(headline(status))
        Console().print(member_table(status["members"]))
    if not status["healthy"]:
        raise click.exceptions.Exit(1)
