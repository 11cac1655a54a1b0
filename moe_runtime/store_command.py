"""`moe-runtime store status | ls | verify | drain | rebalance | tenants | writers`.

Asks the administration service (`--url`, with the administrators' token), or the masters themselves
(`--master`, with the cluster secret).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

import click
import msgspec
from click.core import ParameterSource
from rich.console import Console

from moe_runtime import store_tables as tables
from moe_runtime.options import ConfigRefused, NumberRange

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.admin.direct_admin import DirectAdmin
    from kvstore.admin.remote_admin import RemoteAdmin
    from kvstore.admin.reports import VerifyReport

    Admin = RemoteAdmin | DirectAdmin

Command = TypeVar("Command", bound="Callable[..., Any]")

DEFAULT_URL: Final = "http://127.0.0.1:9003"
UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "p": 1 << 50}


class Bytes(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2 only
    """A number of bytes, like 4096, 64KiB, 1.5GiB."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read the number and its unit."""
        if isinstance(value, int):
            return value
        text = str(value).strip().lower().removesuffix("b").removesuffix("i")
        number, unit = (text[:-1], text[-1]) if text and text[-1] in "kmgtp" else (text, "")
        try:
            nbytes = round(float(number) * UNITS[unit])
        except (ValueError, OverflowError):
            nbytes = -1
        if nbytes < 0:
            self.fail(f"{value!r} is not a number of bytes, like 4096, 64KiB or 1.5GiB", param, ctx)
        return nbytes


def reached(command: Command) -> Command:
    """Give a command its administrator `admin`, and turn the store's errors into one line each."""

    @click.option("--url", envvar="MOE_RUNTIME_STORE_URL", show_default=DEFAULT_URL,
                  help="The administration service.")  # fmt: skip
    @click.option("--token-file", envvar="MOE_RUNTIME_STORE_TOKEN_FILE",
                  type=click.Path(path_type=Path),
                  help="File with the administrators' token.")  # fmt: skip
    @click.option("--authority", type=click.Path(path_type=Path, exists=True, dir_okay=False),
                  help="PEM file of who signed the service's certificate.")  # fmt: skip
    @click.option("--master", "masters", multiple=True,
                  help="Ask this master itself; one for each shard, in order.")  # fmt: skip
    @click.option("--secret-file", type=click.Path(path_type=Path),
                  help="File with the cluster secret, for --master.")  # fmt: skip
    @click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
    @functools.wraps(command)
    def reaching(
        *,
        url: str | None,
        token_file: Path | None,
        authority: Path | None,
        masters: tuple[str, ...],
        secret_file: Path | None,
        **options: Any,
    ) -> None:
        from kvstore import KVStoreError  # here: it brings torch, which `--help` does without

        _check_one_way()
        try:
            admin = (
                _direct(masters, secret_file)
                if masters
                else _remote(url or DEFAULT_URL, token_file, authority)
            )
            with admin:
                command(admin=admin, **options)
        except BrokenPipeError:
            raise  # who read our output went away (`| head`): click ends without a word
        except (KVStoreError, ValueError, OSError) as error:
            raise click.ClickException(_in_one_line(error)) from error

    return reaching  # type: ignore[return-value]


@click.group(name="store")
def store_command() -> None:
    """Administer the pooled KV-cache store.

    Exit status: 0 done, 1 it failed or found bad copies, 2 the command line is wrong.
    """


@store_command.command()
@reached
def status(admin: Admin, as_json: bool) -> None:
    """Show masters and segments. Exit status 1 if the store cannot be used."""
    report = admin.status()
    if as_json:
        _print_json(report)
    else:
        click.echo(tables.headline(report))
        for table in (tables.master_table(report), tables.segment_table(report)):
            tables.show(_console(), table)
    if not report.ready:
        raise click.exceptions.Exit(1)


@store_command.command()
@reached
@click.option("--after", default="", metavar="KEY", help="Begin behind this key.")
@click.option("--limit", default=100, show_default=True, type=click.IntRange(1, 1 << 14))
@click.option("--all", "everything", is_flag=True, help="All pages; --limit is the page's size.")
@click.option("--tenant", help="Only blocks of this tenant.")
@click.option("--group", help="Only blocks of this group.")
def ls(
    admin: Admin,
    as_json: bool,
    after: str,
    limit: int,
    everything: bool,
    tenant: str | None,
    group: str | None,
) -> None:
    """List blocks in the order of their keys. With --json, one object a line."""
    next_after: str | None = after
    first = True
    while next_after is not None and (first or everything):
        page = admin.blocks(after=next_after, limit=limit, tenant=tenant, group=group)
        if as_json:
            for block in page.blocks:
                click.echo(msgspec.json.encode(block).decode())
        elif page.blocks or first:
            tables.show(_console(), tables.block_table(page, with_header=first))
        next_after, first = page.next_after, False
    if next_after is not None:
        click.echo(f"more: --after {next_after}", err=True)


@store_command.command()
@reached
@click.option("--sample", default=1.0, show_default=True,
              type=NumberRange(0, 1, min_open=True),
              help="Share of the blocks to verify.")  # fmt: skip
@click.option("--seed", default=0, help="Another one samples other blocks.")
@click.option("--only-look", is_flag=True, help="Do not tell the masters, which drop bad copies.")
def verify(admin: Admin, as_json: bool, sample: float, seed: int, only_look: bool) -> None:
    """Read copies of blocks where they lie and check every byte.

    Exit status 1 if one is bad, out of reach, or the verification did not come to its end.
    """
    from kvstore.admin.reports import VerifyOptions, VerifyState

    options = VerifyOptions(share=sample, seed=seed, report=not only_look)
    job_id = admin.verify(options)
    try:
        report = _watch_verification(admin, job_id)
    except KeyboardInterrupt:
        report = admin.cancel_verification(job_id)
    if as_json:
        _print_json(report)
    else:
        click.echo(tables.verify_line(report))
        if report.bad:
            tables.show(_console(), tables.bad_table(report))
    if report.state is not VerifyState.DONE or report.bad_copies:
        raise click.exceptions.Exit(1)


@store_command.command()
@reached
@click.argument("node")
@click.option("--cancel", is_flag=True, help="Stop draining; what was moved stays where it is.")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until it is empty.")
@click.option("--timeout", "timeout_s", default=600.0, show_default=True, type=NumberRange(0, 1e6),
              help="Longest wait, in seconds.")  # fmt: skip
@click.option("--fewer-copies", is_flag=True,
              help="One copy elsewhere is enough, also of blocks that their writers wanted on"
              " several failure domains.")  # fmt: skip
def drain(
    admin: Admin,
    as_json: bool,
    node: str,
    cancel: bool,
    wait: bool,
    timeout_s: float,
    fewer_copies: bool,
) -> None:
    """Move all blocks away from a node.

    NODE is its name, or an unambiguous beginning of it. The wait ends early where nothing can move
    any more; what is left, and why, is said then. The drain itself goes on until --cancel.

    Exit status 1 if something is left there at the end of the wait.
    """
    from kvstore.admin.drains import watch_drain

    if cancel and fewer_copies:
        raise click.UsageError("--cancel and --fewer-copies exclude one another")
    name = _whole_name(admin, node)
    waited = wait and not cancel
    if waited:
        with tables.progress_bar("blocks moved") as advance:
            report = watch_drain(
                admin, name, timeout_s=timeout_s, fewer_copies=fewer_copies, progress=advance
            )
    else:
        report = admin.drain(name, cancel=cancel, fewer_copies=fewer_copies)
    if as_json:
        _print_json(report)
    else:
        click.echo(tables.drain_line(name, report, cancelled=cancel))
    if waited and report.left_blocks:
        raise click.exceptions.Exit(1)


@store_command.command()
@reached
@click.argument("nbytes", type=Bytes())
def rebalance(admin: Admin, as_json: bool, nbytes: int) -> None:
    """Move at most NBYTES from full segments to empty ones, in the background."""
    report = admin.rebalance(nbytes)
    if as_json:
        _print_json(report)
    else:
        click.echo(f"{report.planned} copies planned")


@store_command.command()
@reached
@click.option("--set", "quotas", multiple=True, metavar="TENANT=BYTES",
              help="Change a quota first; BYTES may be `none`.")  # fmt: skip
def tenants(admin: Admin, as_json: bool, quotas: tuple[str, ...]) -> None:
    """Show what each tenant may use, and uses."""
    for tenant, nbytes in map(_parse_quota, quotas):
        admin.set_quota(tenant, nbytes)
    page = admin.tenants()
    if as_json:
        _print_json(page)
    else:
        tables.show(_console(), tables.tenant_table(page))


@store_command.command()
@reached
@click.option("--dead", default=None, metavar="WRITER",
              help="First say that this one (its name, or an unambiguous beginning of it) certainly"
              " runs no more; were it alive, it would spoil others' blocks.")  # fmt: skip
def writers(admin: Admin, as_json: bool, dead: str | None) -> None:
    """Show who may still write to what. Of the dead, it is quarantined until somebody says so."""
    if dead is not None:
        admin.confirm_dead(_one_of([row.writer for row in admin.writers().writers], dead, "writer"))
    page = admin.writers()
    if as_json:
        _print_json(page)
    else:
        tables.show(_console(), tables.writer_table(page))


def _parse_quota(text: str) -> tuple[str, int | None]:
    tenant, given, number = text.partition("=")
    if not given or not tenant:
        raise click.UsageError(f"--set {text!r}: expected TENANT=BYTES")
    return tenant, None if number == "none" else Bytes().convert(number, None, None)


def _check_one_way() -> None:
    """Refuse options of both ways to the store; what the environment says is no option."""
    context = click.get_current_context()

    def given(*names: str) -> list[str]:
        return [
            f"--{name.replace('_', '-')}" if name != "masters" else "--master"
            for name in names
            if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        ]

    service, direct = given("url", "token_file", "authority"), given("masters", "secret_file")
    if service and direct:
        of_service, of_masters = ", ".join(service), ", ".join(direct)
        raise click.UsageError(
            f"{of_service} is for the service, {of_masters} for the masters: one of the two ways"
        )


def _in_one_line(error: Exception) -> str:
    from kvstore import MasterUnavailable
    from kvstore.admin.silent_master import why_silent
    from transfer import RpcTimeout

    line = " ".join(str(error).split())
    if isinstance(error, MasterUnavailable) and isinstance(error.__cause__, RpcTimeout):
        return f"{line}; {why_silent(error.address)}"
    return line


def _remote(url: str, token_file: Path | None, authority: Path | None) -> RemoteAdmin:
    from kvstore.admin.remote_admin import RemoteAdmin
    from kvstore.admin.tokens import read_token

    if token_file is None:
        raise click.UsageError(
            "--token-file (MOE_RUNTIME_STORE_TOKEN_FILE) is needed, or --master and --secret-file"
        )
    where = url if "://" in url else f"http://{url}"
    problem = _problem_of_url(where)
    if problem is not None:
        raise click.BadParameter(f"{problem}, seen {url!r}", param_hint="--url")
    return RemoteAdmin(where, token=read_token(token_file), authority=authority)


def _problem_of_url(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is none
        good = False
    return None if good else "expected http://HOST:PORT or https://HOST:PORT"


def _direct(masters: tuple[str, ...], secret_file: Path | None) -> DirectAdmin:
    from configs.addresses import check_address
    from configs.schema import ClusterConfig, TransferConfig
    from kvstore.admin.direct_admin import DirectAdmin
    from moe_runtime.cluster_secret import SecretInvalid, read_secret

    if secret_file is None:
        raise click.UsageError("--master needs --secret-file, the file with the cluster secret")
    try:
        secret = read_secret(ClusterConfig(secret_file=secret_file))
    except SecretInvalid as error:
        raise ConfigRefused(str(error)) from error
    try:
        for address in masters:
            check_address(address)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--master") from error
    return DirectAdmin(masters, TransferConfig(), secret=secret)


def _whole_name(admin: Admin, given: str) -> str:
    return _one_of(sorted({segment.node for segment in admin.status().segments}), given, "node")


def _one_of(names: list[str], given: str, what: str) -> str:
    found = [given] if given in names else [name for name in names if name.startswith(given)]
    if len(found) == 1 and given:
        return found[0]
    several = len(found) > 1
    problem = f"more than one {what} begins with" if several else f"there is no {what}"
    raise click.ClickException(f"{problem} {given!r}; {what}s: {', '.join(names) or 'none'}")


def _watch_verification(admin: Admin, job_id: str) -> VerifyReport:
    from kvstore.admin.reports import VerifyState

    with tables.progress_bar("copies verified") as advance:
        while True:
            report = admin.verification(job_id)
            advance(report.checked_copies + report.gone_copies, report.expected_copies)
            if report.state is not VerifyState.RUNNING:
                return report


def _print_json(report: msgspec.Struct) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(report)).decode())


def _console() -> Console:
    # Names are what clients said: `[/x]` is no markup, and `:key:` no picture.
    console = Console(markup=False, emoji=False)
    # A pipe has no width; keys and names must not be cut there.
    return console if console.is_terminal else Console(width=200, markup=False, emoji=False)
