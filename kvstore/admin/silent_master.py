"""Why a master gives no answer, as far as that can be seen from outside.

A master with another secret and one that is stopped are silent alike: neither says a word to who
has not proved the secret. Whether anybody listens there at all is easily found out.
"""

from __future__ import annotations

import socket
from typing import Final

LOOK_S: Final = 1.0


def why_silent(address: str, *, timeout_s: float = LOOK_S) -> str:
    """Call an address that did not answer, and return what that shows. Waits so long at most."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except TimeoutError:
        return f"{address} cannot be reached"
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return f"nobody can be called at {address}: {reason}"
    return (
        f"somebody listens at {address}, but does not answer: it has another cluster secret, is no"
        " master, or hangs"
    )
