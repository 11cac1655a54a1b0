"""`moe-runtime store`: tables for people, JSON for programs, one line and an exit status if not."""

from __future__ import annotations

import errno
import io
import json
import secrets
import socket

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from configs.kvstore_admin import KVAdminConfig
from configs.schema import TransferConfig
from kvstore.admin.admin_server import AdminServer
from kvstore.admin.store_admin import StoreAdmin
from kvstore.wire import messages as m
from moe_runtime import store_command, store_tables
from moe_runtime.cli import main
from moe_runtime.store_command import Bytes
from moe_runtime.store_tables import shown_bytes
from tests.support.scripted_master import SECRET, ScriptedMaster, figures, segment

NODE = "0123456789abcdef"


@pytest.fixture
def master():
    with ScriptedMaster(
        [secrets.token_bytes(16) for _ in range(7)],
        segments=[segment(NODE), segment("fedc")],
        tenants=[m.TenantFigures("team", 3 << 20, 10, 1)],
        statistics=figures(blocks=7, hit_blocks=3, missed_blocks=1),
    ) as master:
        yield master


@pytest.fixture
def store(master, tmp_path):
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(16))
    token.chmod(0o600)
    config = KVAdminConfig(enabled=True, port=0, token_file=token)
    with AdminServer(config, [master.address], TransferConfig(), secret=SECRET) as server:

        def run(*arguments: str, url: str = server.url, token_file: object = token) -> Result:
            reach = ["--url", url, "--token-file", str(token_file)]
            # `main.main`: calling the group itself would end this process.
            return CliRunner().invoke(main, ["store", arguments[0], *reach, *arguments[1:]])

        yield run


def test_status_is_a_line_and_two_tables(store):
    result = store("status")
    assert result.exit_code == 0, result.output
    assert "ready; 2 nodes, 7 blocks" in result.output
    assert "75.0% hits" in result.output
    assert NODE in result.output


def test_status_fails_where_the_store_cannot_be_used(store, master):
    master.segments.clear()
    result = store("status", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["segments"] == []


def test_pages_are_followed(store, master):
    result = store("ls", "--limit", "3", "--all", "--json")
    keys = [json.loads(line)["key"] for line in result.stdout.splitlines()]
    assert keys == [key.hex() for key in master.keys]
    first = store("ls", "--limit", "3")
    assert f"more: --after {keys[2]}" in first.stderr
    assert all(key in first.stdout for key in keys[:3])
    rest = store("ls", "--after", keys[2])
    assert keys[2] not in rest.stdout
    assert all(key in rest.stdout for key in keys[3:])
    assert rest.stderr == ""


def test_an_empty_page_is_an_empty_table(store, master):
    master.keys.clear()
    result = store("ls", "--all")
    assert (result.exit_code, "key" in result.stdout) == (0, True)


def test_names_of_clients_are_shown_and_nothing_else(store):
    """Neither markup, nor pictures, nor anything that steers a terminal."""
    result = store("ls", "--group", "[/x] [red] :key: \x1b[2J\n")
    assert result.exit_code == 0, result.output
    assert result.stdout.count(r"[/x] [red] :key: \x1b[2J\n") == 7


@pytest.mark.parametrize("width", [30, 80, 200])
def test_no_name_is_cut_on_a_narrow_terminal(master, width):
    with StoreAdmin(master.address, secret=SECRET) as admin:
        report, page = admin.status(), admin.blocks()
    shown = io.StringIO()
    console = Console(file=shown, width=width, markup=False)
    for table in (
        store_tables.master_table(report),
        store_tables.segment_table(report),
        store_tables.block_table(page, with_header=True),
    ):
        store_tables.show(console, table)
    lines = shown.getvalue().splitlines()
    for name in (master.address, NODE, *(key.hex() for key in master.keys)):
        assert any(name in line for line in lines), name
    assert ("largest hole  256 KiB" in lines) == (width < 200)
    assert any("node" in line and "largest hole" in line for line in lines) == (width == 200)


def test_a_drain_is_waited_for(store, master):
    master.drains[NODE] = [m.Draining(2, 20, 0, 0), m.Draining(1, 10, 1, 0), m.Draining(0, 0, 2, 0)]
    result = store("drain", "0123")
    assert (result.exit_code, result.stdout) == (0, f"{NODE} is empty; 2 blocks were moved\n")


def test_a_drain_that_is_stuck_fails(store, master):
    master.drains[NODE] = [m.Draining(2, 2048, 5, 2)]
    result = store("drain", NODE)
    assert result.exit_code == 1
    assert "2 blocks (2 KiB) left, 2 of them with nowhere to go; 5 were moved" in result.stdout
    assert store("drain", NODE, "--no-wait").exit_code == 0
    assert "not drained any more" in store("drain", NODE, "--cancel").stdout
    assert master.asked[-1] == m.Drain(NODE, cancel=True)


def test_a_drain_says_what_it_waits_for(store, master):
    report = m.Draining(7, 7, 0, 6, no_node_blocks=1, no_domain_blocks=2, in_use_blocks=1)
    master.drains[NODE] = [report]
    result = store("drain", NODE, "--fewer-copies")
    assert result.exit_code == 1
    assert master.asked[-1] == m.Drain(NODE, fewer_copies=True)
    for line in (
        "1 blocks wait for another node", "2 blocks wait for a node in another failure domain",
        "3 blocks wait for room", "1 blocks are being read or written", "The drain goes on",
    ):  # fmt: skip
        assert line in result.stdout
    report = json.loads(store("drain", NODE, "--json").stdout)
    assert (report["node"], report["state"], report["no_domain_blocks"]) == (NODE, "stuck", 2)
    assert store("drain", NODE, "--cancel", "--fewer-copies").exit_code == 2


def test_a_drain_that_takes_too_long_fails(store, master):
    master.drains[NODE] = [m.Draining(2, 2048, 5, 0)]
    assert store("drain", NODE, "--timeout", "0").exit_code == 1


@pytest.mark.parametrize(("name", "problem"), [("unknown", "there is no node"), ("", "more than")])
def test_unknown_nodes_are_named_with_those_there_are(store, name, problem):
    result = store("drain", name)
    assert result.exit_code == 1
    assert problem in result.stderr
    assert NODE in result.stderr


def test_rebalance_and_quotas(store, master):
    assert store("rebalance", "1.5GiB").stdout == "2 copies planned\n"
    assert master.asked[-1] == m.Rebalance(3 << 29)
    result = store("tenants", "--set", "team=64MiB", "--set", "other=none")
    assert m.SetQuota("team", 64 << 20) in master.asked
    assert m.SetQuota("other", None) in master.asked
    assert "3 MiB" in result.stdout
    assert json.loads(store("tenants", "--json").stdout)["tenants"][0]["tenant"] == "team"
    assert store("tenants", "--set", "nobody=1").exit_code == 1


def test_verify_reports_what_is_out_of_reach(store):
    result = store("verify", "--only-look")
    assert result.exit_code == 1
    assert "7 bad" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [("ls", "--limit", "0"), ("ls", "--limit", "x"), ("verify", "--sample", "0"), ("drain",),
     ("tenants", "--set", "=5"), ("rebalance",),
     ("rebalance", "much"), ("rebalance", "-1"), ("tenants", "--set", "team"),
     ("verify", "--sample", "nan"), ("drain", "x", "--timeout", "nan"),
     ("drain", "x", "--timeout", "-1"), ("tenants", "--set", "team=much"),
     ("status", "--master", "127.0.0.1:1"), ("paint",)],
)  # fmt: skip
def test_nonsense_is_a_usage_error(store, arguments):
    result = store(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output


def test_a_key_that_is_none_fails(store):
    result = store("ls", "--after", "here")
    assert result.exit_code == 1
    assert "a key is 32 hexadecimal digits" in result.stderr


def test_no_access_is_one_line(store, tmp_path):
    wrong = tmp_path / "wrong"
    wrong.write_text("x" * 16)
    wrong.chmod(0o600)
    for result in (
        store("status", token_file=wrong),
        store("status", token_file=tmp_path / "missing"),
        store("status", url="http://127.0.0.1:1"),
    ):
        assert result.exit_code == 1, result.output
        assert result.stderr.startswith("Error: ")
        assert result.stderr.count("\n") == 1
    bare = CliRunner().invoke(main, ["store", "status"])
    assert bare.exit_code == 2
    assert "--token-file" in bare.stderr


def test_masters_are_asked_directly_with_the_cluster_secret(master, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    reach = ["--master", master.address, "--secret-file", str(secret)]
    result = CliRunner().invoke(main, ["store", "status", *reach])
    assert result.exit_code == 0, result.output
    assert CliRunner().invoke(main, ["store", "verify", *reach]).exit_code == 1
    secret.chmod(0o644)
    assert CliRunner().invoke(main, ["store", "status", *reach]).exit_code == 2
    assert CliRunner().invoke(main, ["store", "status", *reach[:2]]).exit_code == 2


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("17", 17), ("4k", 4096), ("64KiB", 65536), ("1.5 MB", 3 << 19), ("2t", 2 << 40)],
)
def test_numbers_of_bytes_have_units(text, nbytes):
    assert Bytes().convert(text, None, None) == nbytes


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5 TiB")]
)
def test_bytes_are_shown_with_units(nbytes, text):
    assert shown_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--master", "nonsense", "--secret-file", "x"], "expected HOST:PORT, seen 'nonsense'"),
        (["--master", "", "--secret-file", "x"], "expected HOST:PORT, seen ''"),
        (["--master", "h:1", "--token-file", "x"], "one of the two ways"),
        (["--url", "http://h:1", "--secret-file", "x"], "one of the two ways"),
        (["--url", "ftp://h:1", "--token-file", "x"], "seen 'ftp://h:1'"),
        (["--url", "http://", "--token-file", "x"], "seen 'http://'"),
        (["--url", "http://h:99999", "--token-file", "x"], "seen 'http://h:99999'"),
    ],
)
def test_ways_that_lead_nowhere_are_refused_before_anybody_is_asked(tmp_path, options, problem):
    file = tmp_path / "x"
    file.write_text(secrets.token_hex(16))
    file.chmod(0o600)
    options = [str(file) if option == "x" else option for option in options]
    result = CliRunner().invoke(main, ["store", "status", *options])
    assert (result.exit_code, problem in " ".join(result.stderr.split())) == (2, True), (
        result.stderr
    )


def test_the_environment_does_not_stand_in_the_way_of_masters(master, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    environment = {"MOE_RUNTIME_STORE_URL": "http://h:1", "MOE_RUNTIME_STORE_TOKEN_FILE": "t"}
    reach = ["--master", master.address, "--secret-file", str(secret)]
    result = CliRunner().invoke(main, ["store", "status", *reach], env=environment)
    assert result.exit_code == 0, result.output


def test_a_silent_master_is_looked_at(master):
    other = secrets.token_bytes(16)
    with StoreAdmin(master.address, secret=other, timeout_s=3.0) as admin:
        (report,) = admin.status().masters
        assert "another cluster secret" in str(report.problem)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with StoreAdmin(f"127.0.0.1:{port}", secret=other, timeout_s=3.0) as admin:
        assert "refused" in str(admin.status().masters[0].problem)


def test_what_a_dead_writer_left_is_freed_when_somebody_says_so(store, master):
    master.writers = [
        m.WriterFigures(writer=name, open_bytes=0, quarantined_bytes=3 << 20)
        for name in ("abcd", "abff", "0123")
    ]
    shown = store("writers").stdout
    assert all(name in shown for name in ("abcd", "abff", "0123"))
    assert "3 MiB" in shown
    for unclear in ("ab", "x", ""):
        result = store("writers", "--dead", unclear)
        assert result.exit_code == 1
        assert "writers: 0123, abcd, abff" in result.stderr
        problem = "there is no writer" if unclear == "x" else "more than one writer begins with"
        assert problem in result.stderr
    assert m.Fence(["abcd"], dead=True) not in master.asked
    left = json.loads(store("writers", "--dead", "abc", "--json").stdout)["writers"]
    assert m.Fence(["abcd"], dead=True) in master.asked
    assert [row["writer"] for row in left] == ["0123", "abff"]


def test_who_reads_only_the_beginning_is_told_nothing_more(store, monkeypatch):
    def gone(*arguments, **options):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(store_command, "_print_json", gone)
    result = store("status", "--json")
    assert (result.exit_code, result.stderr) == (1, "")
