"""What a user gets wrong before anything is served: one clear line, the right status, no rest."""

from __future__ import annotations

import json
import logging
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from moe_runtime.cli import main
from tests.support.cluster import served_checkpoint

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    seed = random.SystemRandom().randrange(1 << 30)
    return served_checkpoint(tmp_path_factory.mktemp(f"checkpoint-{seed}"), seed=seed)


@pytest.fixture
def checkpoint(sound: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(sound, tmp_path / "model"))


@pytest.fixture(autouse=True)
def quiet_and_tidy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No log lines between the one line that is expected, and temporary files where we look."""
    monkeypatch.setattr("moe_runtime.logs.configure_logging", lambda who: None)
    monkeypatch.setattr(logging.lastResort, "level", logging.CRITICAL)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    yield
    assert list(temporary.iterdir()) == []


def refusal(*arguments: object, status: int = 1) -> str:
    """Run the command; the one line that it ends with."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == status
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    return line.removeprefix("Error: ")


def serve(model: Path, *settings: str) -> str:
    overrides = [word for setting in settings for word in ("--set", setting)]
    return refusal("serve", "--config", "tiny-test", "--set", f"model.path={model}", *overrides)


def truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def scribble(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"this is no tensor file")


def no_tensors(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def other_architecture(directory: Path) -> None:
    edit_config(directory, architectures=["LlamaForCausalLM"], model_type="llama")


def missing_field(directory: Path) -> None:
    edit_config(directory, hidden_size=None)


def no_json(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def integers(directory: Path) -> None:
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = tensors[name].to(torch.int32)
    save_file(tensors, path)


def no_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


def bad_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')


def edit_config(directory: Path, **values: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (truncate, "model.safetensors: not readable"),
        (scribble, "model.safetensors: not readable"),
        (no_tensors, "model.safetensors"),
        (other_architecture, "LlamaForCausalLM is not supported (expected Qwen3MoeForCausalLM)"),
        (missing_field, "config.json: hidden_size: missing"),
        (no_json, "config.json: "),
        (integers, "model.layers.1.mlp.experts.5.up_proj.weight: expected a floating type"),
        (no_tokenizer, "tokenizer.json: no such file"),
        (bad_tokenizer, "tokenizer.json: "),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_spoilt_checkpoint(checkpoint: Path, spoil: Callable[[Path], None], named: str) -> None:
    spoil(checkpoint)
    line = serve(checkpoint)
    assert str(checkpoint) in line
    assert named in line


def test_no_checkpoint(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert serve(nowhere) == f"checkpoint directory not found: {nowhere}"


@pytest.mark.parametrize("knob", ["front.port", "cluster.membership_port"])
def test_a_port_in_use(checkpoint: Path, knob: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = serve(checkpoint, f"{knob}={port}")
    assert line == f"the cluster did not start: {knob}: 127.0.0.1:{port}: Address already in use"


@pytest.mark.parametrize(
    ("content", "mode", "complaint"),
    [
        (None, 0o600, "No such file or directory"),
        (b"long enough to be a secret", 0o644, "other users can read it: chmod 600"),
        (b"long enough to be a secret", 0o620, "other users can read it: chmod 600"),
        (b"  short \n", 0o600, "5 bytes, expected at least 16"),
        (b"", 0o600, "0 bytes, expected at least 16"),
    ],
)
def test_a_bad_secret(
    checkpoint: Path, tmp_path: Path, content: bytes | None, mode: int, complaint: str
) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    line = serve(checkpoint, f"cluster.secret_file={path}")
    assert line == f"cluster secret {path}: {complaint}"
    settings = ("--config", "tiny-test", "--set", f"cluster.secret_file={path}")
    assert refusal("launch", *settings) == line


@pytest.mark.parametrize("command", ["serve", "launch", "demo"])
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--set", "front.prot=1"), "no such setting; did you mean front.port?"),
        (("--set", "cluster.workers=none"), "expected an integer >= 1 and <= 1024"),
        (("--set", "model.dtype=int8"), "model.dtype = 'int8'"),
        (("--config", "nonsense"), "no such preset; there are"),
        (("--config", "./nowhere.yaml"), "No such file or directory"),
    ],
)
def test_a_bad_configuration(command: str, arguments: tuple[str, ...], complaint: str) -> None:
    result = CliRunner().invoke(main, [command, *arguments])
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2
    assert result.stdout == ""
    # The first line says where the configuration is from, the second what is wrong with it.
    lines = result.stderr.splitlines()
    assert len(lines) <= 2
    assert lines[0].startswith("Error: ")
    assert complaint in lines[-1]


def test_workers_without_a_front(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_bytes(random.randbytes(20).hex().encode())
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, not listening
        port = held.getsockname()[1]
        settings = [
            *("--config", "tiny-test", "--set", f"cluster.secret_file={secret}"),
            *("--set", f"cluster.membership_port={port}", "--set", "elastic.store_timeout_s=4"),
        ]
        expected = f"no answer from 127.0.0.1:{port}: Connection refused"
        assert expected in refusal("launch", *settings)
        worker = python("-m", "moe_runtime.worker", *settings)
    assert worker.returncode == 1
    (line,) = worker.stderr.splitlines()
    assert expected in line


def test_as_a_real_process_too(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    done = python("-m", "moe_runtime", "serve", "--set", f"model.path={nowhere}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"Error: checkpoint directory not found: {nowhere}\n"


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
