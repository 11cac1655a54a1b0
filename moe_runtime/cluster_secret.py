"""The cluster secret: who has it belongs to the cluster.

It is read from a file that only its owner may read; `serve` makes one for its own run. It is
never on a command line and never in a log.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from moe_runtime.errors import MoeRuntimeError

if TYPE_CHECKING:
    from pathlib import Path

    from configs.schema import ClusterConfig

SECRET_BYTES_MIN = 16


class SecretInvalid(MoeRuntimeError):
    """There is no usable cluster secret."""

    path: str
    problem: str

    def _message(self) -> str:
        return f"cluster secret {self.path}: {self.problem}"


def new_secret(path: Path) -> bytes:
    """Write a fresh secret that only this user can read, and return it."""
    secret = secrets.token_hex(32).encode()
    path.touch(mode=0o600, exist_ok=False)
    path.write_bytes(secret)
    return secret


def read_secret(cluster: ClusterConfig) -> bytes:
    """Read the secret that the configuration names.

    Raises:
        SecretInvalid: No file is named, or it is missing, too short, or open to others.
    """
    path = cluster.secret_file
    if path is None:
        raise SecretInvalid(
            path="(unset)", problem="cluster.secret_file is needed to join a cluster"
        )
    try:
        mode = path.stat().st_mode
        secret = path.read_bytes().strip()
    except OSError as error:
        raise SecretInvalid(path=str(path), problem=error.strerror or str(error)) from error
    if mode & 0o077:
        raise SecretInvalid(path=str(path), problem="other users can read it: chmod 600")
    if len(secret) < SECRET_BYTES_MIN:
        problem = f"{len(secret)} bytes, expected at least {SECRET_BYTES_MIN}"
        raise SecretInvalid(path=str(path), problem=problem)
    return secret
