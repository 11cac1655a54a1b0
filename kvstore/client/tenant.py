"""For whom a client acts: its name to the master, and the salt of its keys.

    key in the pool = xxh3_128(salt | key)     salt = blake2b(name, key=token)

Without the token nobody can name a tenant's block, so tenants neither read one another's blocks
nor clash. A new token makes new keys: what was stored under the old one is not found any more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash

from kvstore.keys import KEY_BYTES


@dataclass(frozen=True, slots=True)
class Tenant:
    """A name, and the token that proves it. The name "" is nobody in particular: no salt."""

    name: str = ""
    token: str = field(default="", repr=False)

    def salted(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the keys as the pool knows them."""
        if not self.name:
            return list(keys)
        digest = hashlib.blake2b(self.token.encode(), digest_size=32).digest()
        salt = hashlib.blake2b(self.name.encode(), key=digest, digest_size=KEY_BYTES).digest()
        return [xxhash.xxh3_128_digest(salt + key) for key in keys]
