"""How many bytes of bulk may be under way on a rail, so that what is urgent need not wait long."""

from __future__ import annotations

from typing import Final

# Bulk bytes under way on a rail: so many seconds' worth of it, within bounds.
BULK_S: Final = 4e-3
BULK_BYTES_MIN: Final = 6 << 20
BULK_BYTES_MAX: Final = 32 << 20
# The same while urgent traffic is about, which was seen within the last so many seconds.
BULK_BESIDE_URGENT_S: Final = 1e-3
BULK_BESIDE_URGENT_BYTES: Final = 512 << 10
URGENT_MEMORY_S: Final = 0.02


def bulk_bytes_max(bandwidth: float, quiet_s: float) -> float:
    """Return the bound.

    Args:
        bandwidth: of the rail, bytes/s.
        quiet_s: since urgent traffic was seen last.
    """
    if quiet_s < URGENT_MEMORY_S:
        bound = max(bandwidth * BULK_BESIDE_URGENT_S, BULK_BESIDE_URGENT_BYTES)
    else:
        bound = max(bandwidth * BULK_S, BULK_BYTES_MIN)
    return min(bound, BULK_BYTES_MAX)
