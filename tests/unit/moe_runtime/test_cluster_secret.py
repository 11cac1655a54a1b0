"""Secrets are read only from files that nobody else can read."""

from __future__ import annotations

import stat

import pytest

from configs.schema import ClusterConfig
from moe_runtime.cluster_secret import SecretInvalid, new_secret, read_secret


def test_a_new_secret_is_private_and_can_be_read(tmp_path):
    path = tmp_path / "secret"
    secret = new_secret(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_secret(ClusterConfig(secret_file=path)) == secret
    assert new_secret(tmp_path / "other") != secret


def test_an_existing_file_is_not_overwritten(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(b"of somebody else")
    with pytest.raises(FileExistsError):
        new_secret(path)
    assert path.read_bytes() == b"of somebody else"


def test_white_space_around_it_does_not_count(tmp_path):
    path = tmp_path / "secret"
    secret = new_secret(path)
    path.write_bytes(secret + b"\n")
    assert read_secret(ClusterConfig(secret_file=path)) == secret


@pytest.mark.parametrize(
    ("content", "mode", "problem"),
    [
        (None, 0, "No such file"),
        (b"x" * 64, 0o644, "chmod 600"),
        (b"x" * 64, 0o620, "chmod 600"),
        (b"x" * 15, 0o600, "15 bytes"),
        (b" " * 64, 0o600, "0 bytes"),
    ],
)
def test_refusals_name_the_file_and_never_its_content(tmp_path, content, mode, problem):
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(SecretInvalid, match=problem) as refused:
        read_secret(ClusterConfig(secret_file=path))
    assert str(path) in str(refused.value)
    assert "xxx" not in str(refused.value)


def test_a_cluster_needs_a_file():
    with pytest.raises(SecretInvalid, match="secret_file is needed"):
        read_secret(ClusterConfig())
