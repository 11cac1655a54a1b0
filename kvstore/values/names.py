"""What users call a value: a name, or a key of 16 bytes that says what the bytes are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvstore.errors import InvalidKey
from kvstore.keys import KEY_BYTES, named_key

NAME_BYTES_MAX: Final = 1024

Name = str | bytes


def key_of(name: Name, namespace: bytes) -> bytes:
    """Return the 16-byte key of a name; a key stands for itself.

    Args:
        name: 1 to `NAME_BYTES_MAX` bytes of UTF-8, or a key.
        namespace: From `block_namespace`; names of other namespaces are other names.

    Raises:
        InvalidKey: Empty, too long, or no key.
    """
    if isinstance(name, str):
        size = len(name) if name.isascii() else _encoded_bytes(name)
        if not 0 < size <= NAME_BYTES_MAX:
            raise InvalidKey(problem=f"a name has 1 to {NAME_BYTES_MAX} bytes, got {size}")
        return named_key(namespace, name)
    if type(name) is not bytes or len(name) != KEY_BYTES:
        raise InvalidKey(problem=f"neither a name nor {KEY_BYTES} bytes: {name!r:.40}")
    return name


def _encoded_bytes(name: str) -> int:
    try:
        return len(name.encode())
    except UnicodeEncodeError as error:
        raise InvalidKey(problem=f"a name that is no UTF-8: {name!r:.40}") from error


def keys_of(names: Sequence[Name], namespace: bytes) -> list[bytes]:
    """Return the keys of names. A single name is no sequence of names.

    Raises:
        InvalidKey: See `key_of`.
    """
    if isinstance(names, str | bytes):
        raise InvalidKey(problem="expected a sequence of names, got one")
    return [key_of(name, namespace) for name in names]
