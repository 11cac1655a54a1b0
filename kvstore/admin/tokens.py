"""The bearer token of administrators: from a file that only its owner can read."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import Final

from kvstore.errors import AdminTokenInvalid

TOKEN_BYTES_MIN: Final = 16
TOKEN_BYTES_MAX: Final = 4096


def read_token(path: Path) -> str:
    """Return the token in a file.

    Raises:
        AdminTokenInvalid: The file is missing, open to others, or holds no usable token.
    """
    try:
        mode = path.stat().st_mode
        with path.open("rb") as file:
            token = file.read(TOKEN_BYTES_MAX + 1).strip()
    except OSError as error:
        raise AdminTokenInvalid(path=str(path), problem=error.strerror or str(error)) from error
    if mode & 0o077:
        raise AdminTokenInvalid(path=str(path), problem="other users can read it: chmod 600")
    if not TOKEN_BYTES_MIN <= len(token) <= TOKEN_BYTES_MAX:
        raise AdminTokenInvalid(
            path=str(path),
            problem=f"{len(token)} bytes, expected {TOKEN_BYTES_MIN} to {TOKEN_BYTES_MAX}",
        )
    if not token.isascii() or any(byte <= 0x20 or byte == 0x7F for byte in token):
        raise AdminTokenInvalid(path=str(path), problem="expected printable ASCII without spaces")
    return token.decode()


def authorizes(header: str | None, token: str) -> bool:
    """Tell whether an Authorization header carries the token, in time that tells nothing of it."""
    scheme, _, given = (header or "").partition(" ")
    # Digests are equally long, so the comparison does not even tell the token's length.
    same = hmac.compare_digest(_digest(given.strip()), _digest(token))
    return same and scheme.lower() == "bearer"


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()
