"""The `moe-runtime` command. Subcommands are loaded when they are called, so that `--help` and
`config` work at once, without torch.

Exit codes: 0 done, 1 the command failed, 2 the command line or the configuration is wrong, 130
Ctrl-C ended it before it was done.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn

import click

from moe_runtime import __version__
from moe_runtime.process_end import INTERRUPTED, run_and_end


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyCommand:
    """Where a subcommand lives, and its line in `--help`."""

    module: str
    attribute: str
    help: str


COMMANDS = {
    "config": LazyCommand(
        module="moe_runtime.config_command",
        attribute="config_command",
        help="Show, check or describe the configuration.",
    ),
    "serve": LazyCommand(
        module="moe_runtime.serve",
        attribute="serve_command",
        help="Start front, store and workers on this machine.",
    ),
    "launch": LazyCommand(
        module="moe_runtime.launch",
        attribute="launch_command",
        help="Run this node's workers; only a worker that died is restarted.",
    ),
    "demo": LazyCommand(
        module="moe_runtime.demo",
        attribute="demo_command",
        help="Serve, kill workers under load, and compare every token.",
    ),
    "status": LazyCommand(
        module="moe_runtime.status",
        attribute="status_command",
        help="Show members, view and load of a running server.",
    ),
    "store": LazyCommand(
        module="moe_runtime.store_command",
        attribute="store_command",
        help="Administer the KV store: status, ls, verify, drain, rebalance, ...",
    ),
    "store-master": LazyCommand(
        module="moe_runtime.store_processes",
        attribute="store_master_command",
        help="Run one master of the KV store.",
    ),
    "store-node": LazyCommand(
        module="moe_runtime.store_processes",
        attribute="store_node_command",
        help="Lend this machine's memory and disks to the KV store.",
    ),
    "store-admin": LazyCommand(
        module="moe_runtime.store_admin",
        attribute="store_admin_command",
        help="Serve the administration of the KV store over HTTP.",
    ),
    "doctor": LazyCommand(
        module="moe_runtime.doctor",
        attribute="doctor_command",
        help="Say what works on this machine, and what is missing.",
    ),
    "bench": LazyCommand(
        module="moe_runtime.bench.command",
        attribute="bench_command",
        help="Measure this machine: `bench transfer`.",
    ),
}


class LazyGroup(click.Group):
    """A group that knows its commands' names and imports a command only to run it."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Be the command of this process; a caller that lives on uses `main` instead."""
        run_and_end(lambda: self.main(*args, **kwargs))

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; Ctrl-C, for which it has no other use, ends it without a word."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands whose module is installed, in the order of the table."""
        return [name for name, command in COMMANDS.items() if find_spec(command.module)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command, or None if there is none of that name."""
        if cmd_name not in self.list_commands(ctx):
            return None
        lazy = COMMANDS[cmd_name]
        command = getattr(import_module(lazy.module), lazy.attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{lazy.module}:{lazy.attribute} is not a click command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].help) for name in self.list_commands(ctx)])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="moe-runtime")
def main() -> None:
    """Elastic serving of mixture-of-experts language models."""
