"""Administration of a running pool: nodes are drained under load, copies verified, the CLI used."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from configs.kvstore_admin import KVAdminConfig
from configs.kvstore_policies import FillingPolicy, PolicyConfig
from configs.schema import TransferConfig
from kvstore.admin.admin_server import AdminServer
from kvstore.admin.remote_admin import RemoteAdmin
from kvstore.admin.reports import VerifyOptions, VerifyState
from tests.support.store_worker import StorePool

TOKEN = secrets.token_hex(16)
WAIT_S = 60.0
CALM = PolicyConfig(filling=FillingPolicy(bytes_per_s=0))


def fresh_keys(number):
    return [secrets.token_bytes(16) for _ in range(number)]


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return path


@pytest.fixture
def pool():
    with StorePool(3, segment_bytes=1 << 20, policies=CALM) as pool:
        yield pool


@pytest.fixture
def server(pool, token_file):
    config = KVAdminConfig(enabled=True, port=0, token_file=token_file)
    with AdminServer(config, [pool.master.address], TransferConfig(), secret=pool.secret) as server:
        yield server


@pytest.fixture
def admin(server):
    with RemoteAdmin(server.url, token=TOKEN) as admin:
        yield admin


def verified(admin, **options):
    job_id = admin.verify(VerifyOptions(**options))
    deadline = time.monotonic() + WAIT_S
    while (report := admin.verification(job_id)).state is VerifyState.RUNNING:
        assert time.monotonic() < deadline
    return report


def drained(admin, node):
    deadline = time.monotonic() + WAIT_S
    while (report := admin.drain(node)).left_blocks:
        assert time.monotonic() < deadline, report
        time.sleep(0.1)
    return report


def test_a_node_is_drained_while_clients_read_and_write(pool, admin):
    keys, others = fresh_keys(60), fresh_keys(40)
    leaver, writer, reader = pool.workers
    for start in range(0, 60, 10):  # some on each node
        assert writer.ask("put", keys[start : start + 5]) == ["stored"] * 5
        assert leaver.ask("put", keys[start + 5 : start + 10]) == ["stored"] * 5
    assert admin.drain(leaver.name, cancel=True).left_blocks > 0
    writer.begin("churn", others, 3.0)
    reader.begin("browse", keys, 3.0)
    report = drained(admin, leaver.name)
    assert report.moved_blocks > 0
    got, equal = reader.result()
    assert equal
    assert got > 0
    assert writer.result() >= 40
    # Also those that began before the drain have ended now, and were moved.
    drained(admin, leaver.name)
    assert {copy.where.node for block in admin.blocks().blocks for copy in block.copies} == {
        writer.name,
        reader.name,
    }
    leaver.close()
    pool.workers.remove(leaver)
    for start in range(0, 60, 20):
        part = keys[start : start + 20]
        assert reader.ask("get", part)[:3] == (20, 20, True)
    figures = pool.statistics()
    assert (figures.blocks, figures.lost_blocks, figures.evicted_blocks) == (100, 0, 0)
    report = verified(admin)
    assert (report.state, report.checked_copies, report.bad_copies) == (VerifyState.DONE, 100, 0)


def test_verify_finds_the_bad_copy_and_only_that(pool, admin):
    number = 60  # one share of so many is neither none nor all
    keys = fresh_keys(number)
    writer, other, third = pool.workers
    assert writer.ask("put", keys) == ["stored"] * number
    holder = next(w for w in (other, third) if w.name == writer.ask("get", keys[:1])[3][0])
    damaged = holder.ask("flip").hex()
    report = verified(admin, report=False)
    assert (report.state, report.checked_copies) == (VerifyState.DONE, number)
    assert [(bad.key, bad.node) for bad in report.bad] == [(damaged, holder.name)]
    assert pool.statistics().blocks == number, "only looked"
    assert verified(admin).bad_copies == 1
    assert pool.statistics().corrupt_blocks == 1
    assert [block.key for block in admin.blocks().blocks] == sorted(
        key.hex() for key in keys if key.hex() != damaged
    )
    report = verified(admin)
    assert (report.bad_copies, report.checked_copies) == (0, number - 1)
    sampled = verified(admin, share=0.5).checked_copies
    assert 0 < sampled < number - 1


def test_verify_while_everything_is_overwritten_accuses_nobody(admin, pool):
    writer = pool.workers[0]
    writer.begin("churn", fresh_keys(1500), 6.0)
    checked, deadline = 0, time.monotonic() + 6.0
    while time.monotonic() < deadline:
        report = verified(admin)
        assert (report.state, report.bad_copies) == (VerifyState.DONE, 0), report
        checked += report.checked_copies
    writer.result()
    assert checked > 0
    assert pool.statistics().corrupt_blocks == 0


def test_metrics_are_of_this_pool(pool, server):
    keys = fresh_keys(5)
    assert pool.workers[0].ask("put", keys) == ["stored"] * 5
    headers = {"Authorization": f"Bearer {TOKEN}"}
    text = httpx.get(f"{server.url}/metrics", headers=headers, timeout=WAIT_S).text
    assert f'moe_kvstore_blocks{{master="{pool.master.address}"}} 5.0' in text
    assert text.count("moe_kvstore_segment_capacity_bytes{") == 3
    assert httpx.get(f"{server.url}/ready", timeout=WAIT_S).json()["ready"] is True


class Cli:
    """`moe-runtime store` as its own process."""

    def __init__(self, url: str, token_file: Path) -> None:
        self.environment = {
            **os.environ,
            "MOE_RUNTIME_STORE_URL": url,
            "MOE_RUNTIME_STORE_TOKEN_FILE": str(token_file),
        }

    def __call__(self, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "moe_runtime", "store", *arguments],
            env={**self.environment, **changes},
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )


def test_the_command_line_against_a_running_pool(pool, server, token_file, tmp_path):
    keys = sorted(fresh_keys(30))
    leaver, writer, _ = pool.workers
    assert writer.ask("put", keys) == ["stored"] * 30
    cli = Cli(server.url, token_file)
    status = json.loads(cli("status", "--json").stdout)
    assert len(status["segments"]) == 3
    pages = cli("ls", "--limit", "7", "--all", "--json")
    assert [json.loads(line)["key"] for line in pages.stdout.splitlines()] == [
        key.hex() for key in keys
    ]
    assert cli("drain", leaver.name).returncode == 0
    assert cli("verify").returncode == 0
    assert cli("rebalance", "1MiB").returncode == 0
    assert cli("tenants").returncode == 0
    wrong = tmp_path / "wrong"
    wrong.write_text("x" * 32)
    wrong.chmod(0o600)
    refused = cli("status", MOE_RUNTIME_STORE_TOKEN_FILE=str(wrong))
    assert (refused.returncode, "token" in refused.stderr) == (1, True)
    assert cli("drain", "no-such-node").returncode == 1
    assert cli("ls", "--after", "nonsense").returncode == 1
    assert cli("ls", "--limit", "many").returncode == 2
    assert cli("frobnicate").returncode == 2
    for outcome in (refused, cli("drain", "no-such-node")):
        assert "Traceback" not in outcome.stderr
        assert outcome.stderr.count("\n") == 1


def test_the_service_as_a_process_of_its_own(pool, token_file, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(pool.secret.hex().encode())
    secret.chmod(0o600)
    command = [sys.executable, "-m", "moe_runtime", "store-admin", "--master", pool.master.address]
    settings = {
        "cluster.secret_file": secret,
        "kvstore.admin.token_file": token_file,
        "kvstore.admin.port": 0,
        "kvstore.admin.enabled": "true",
    }
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    refused = subprocess.run(
        [*command, "--set", "kvstore.admin.host=0.0.0.0"],
        capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert refused.returncode == 2
    assert "loopback" in refused.stderr
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = process.stdout.readline().split()[-1]
        # The pool has another secret (this one is its hexadecimal form): the masters say nothing.
        answer = httpx.get(f"{url}/ready", timeout=WAIT_S)
        assert (answer.status_code, answer.json()["masters_away"]) == (503, 1)
        assert httpx.get(f"{url}/live", timeout=WAIT_S).status_code == 200
    finally:
        process.terminate()
        assert process.wait(WAIT_S) == 0
        process.stdout.close()
