"""`store-master` and `store-node` as commands, and the document about masters."""

import re
import secrets
from pathlib import Path

import httpx
import pytest
import yaml
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from configs import load_config
from configs.schema import TransferConfig
from kvstore import StoreClient
from moe_runtime.cli import main
from tests.support.etcd_server import free_ports
from tests.support.serve_process import CommandProcess
from transfer import TransferEngine, allocate

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "kvstore-masters.md"
OF_A_CLUSTER, OF_MASTERS = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
WAIT_S = 60.0


def test_the_example_of_the_document_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(OF_MASTERS, str(DOCUMENT), "exec"), {})
    assert capsys.readouterr().out == "[False, False] 2 masters\n"


def test_a_master_and_a_node_as_commands(tmp_path, monkeypatch, capsys):
    secret = secrets.token_hex(16).encode()
    (tmp_path / "secret").touch(mode=0o600)
    (tmp_path / "secret").write_bytes(secret)
    # Of the store alone: no model.
    config = {
        "cluster": {"secret_file": str(tmp_path / "secret")},
        "kvstore": {"request_timeout_s": WAIT_S},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    common = ["--config", str(file)]
    master = CommandProcess(["-m", "moe_runtime", "store-master", *common], tmp_path / "m")
    with master:
        line = master.wait_for_line(r"store master of shard 0 at (\S+)")
        address = line.group(1)
        command = ["-m", "moe_runtime", "store-node", *common, "--master", address]
        metrics = f"127.0.0.1:{free_ports(1)[0]}"
        with CommandProcess([*command, "--metrics", metrics], tmp_path / "n") as node:
            node.wait_for_line(r"store node (\S+) at (\S+)")
            engine = TransferEngine(TransferConfig(), name=secrets.token_hex(8), secret=secret)
            knobs = load_config(str(file), unneeded=["model.path"]).kvstore
            client = StoreClient(engine, address, knobs, secret=secret)
            engine.on_notify(client.on_notify)
            with engine, client:
                memory = allocate(1 << 16)
                region = engine.register(memory)
                keys = [secrets.token_bytes(16) for _ in range(4)]
                # Until the node is registered there is no space, and the master says so.
                outcomes = client.put(keys, region, [i << 12 for i in range(4)], 1 << 12)
                assert list(outcomes) == ["stored"] * 4
                hit = client.lookup_prefix(keys)
                assert client.get_into(hit, region, [i << 12 for i in range(4)]) == 4
                engine.release(region)
                memory.close()
                text = httpx.get(f"http://{metrics}/metrics", timeout=WAIT_S).text
            told = {family.name: family for family in text_string_to_metric_families(text)}
            assert told["moe_transfer_peers"].samples[0].value >= 1
            events = {s.labels["event"] for s in told["moe_kvstore_node_events"].samples}
            assert {"scrub_bad", "copies_done"} <= events
            assert told["moe_kvstore_node_index_suspended"].samples[0].value == 0
            config["kvstore"]["masters"] = {"addresses": [address]}
            (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(config))
            monkeypatch.chdir(tmp_path)
            exec(compile(OF_A_CLUSTER, str(DOCUMENT), "exec"), {})
            assert capsys.readouterr().out == "stored b'hello'\n"
            for process in (node, master):
                process.process.terminate()
                assert process.process.wait(WAIT_S) == 0, process.log.read_text()


@pytest.mark.parametrize(
    ("command", "options", "problem"),
    [
        ("store-node", [], "kvstore.masters: neither addresses nor etcd.endpoints are set"),
        ("store-node", ["--master", "nonsense"], "expected HOST:PORT, seen 'nonsense'"),
        ("store-admin", ["--set", "kvstore.admin.enabled=false"], "kvstore.admin.enabled is false"),
        ("store-node", ["--metrics", "9000"], "expected HOST:PORT, seen '9000'"),
        ("store-master", ["--shard", "1"], "there are 1"),
        ("store-master", ["--set", "kvstore.masters.addresses=here"], "seen 'here'"),
        ("store-node", ["--master", "127.0.0.1:1", "--set", "kvstore.segments=[{bytes: 1}]"], ""),
    ],
)
def test_nonsense_on_the_command_line_is_one_message(command, options, problem):
    done = CliRunner().invoke(main, [command, *options])
    assert done.exit_code == 2, done.output
    assert problem in " ".join(done.stderr.split())
