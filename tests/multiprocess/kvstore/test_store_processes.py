"""`store-master` and `store-node` as commands, and the document about masters."""

import re
import secrets
from pathlib import Path

import pytest
import yaml

from configs import load_config
from configs.schema import TransferConfig
from kvstore import StoreClient
from tests.support.serve_process import CommandProcess
from transfer import TransferEngine, allocate

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "kvstore-masters.md"
WAIT_S = 60.0


def test_the_example_of_the_document_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    exec(compile(program, str(DOCUMENT), "exec"), {})
    assert capsys.readouterr().out == "[False, False] 2 masters\n"


def test_a_master_and_a_node_as_commands(tmp_path):
    secret = secrets.token_hex(16).encode()
    (tmp_path / "secret").touch(mode=0o600)
    (tmp_path / "secret").write_bytes(secret)
    config = load_config("example").model_dump(mode="json")
    config["cluster"]["secret_file"] = str(tmp_path / "secret")
    config["kvstore"]["request_timeout_s"] = WAIT_S
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    common = ["--config", str(file)]
    master = CommandProcess(["-m", "moe_runtime", "store-master", *common], tmp_path / "m")
    with master:
        line = master.wait_for_line(r"store master of shard 0 at (\S+)")
        address = line.group(1)
        command = ["-m", "moe_runtime", "store-node", *common, "--master", address]
        with CommandProcess(command, tmp_path / "n") as node:
            node.wait_for_line(r"store node (\S+) at (\S+)")
            engine = TransferEngine(TransferConfig(), name=secrets.token_hex(8), secret=secret)
            knobs = load_config(str(file)).kvstore
            client = StoreClient(engine, address, knobs, secret=secret)
            engine.on_notify(lambda peer, payload: client.on_notify(peer, payload) and None)
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
            for process in (node, master):
                process.process.terminate()
                assert process.process.wait(WAIT_S) == 0, process.log.read_text()
