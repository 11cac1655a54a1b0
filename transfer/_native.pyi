"""Types of the compiled part, `native.c`."""

from collections.abc import Sequence

from transfer.pieces import Ints

def copy_one(target: int, source: int, nbytes: int, /) -> None: ...
def copy_pieces(
    target_base: int,
    source_base: int,
    target_offsets: Ints,
    source_offsets: Ints,
    lengths: Ints,
    /,
) -> None: ...
def process_vm_write(
    pid: int,
    remote_base: int,
    local_base: int,
    remote_offsets: Ints,
    local_offsets: Ints,
    lengths: Ints,
    /,
) -> int: ...
def process_vm_read(
    pid: int,
    remote_base: int,
    local_base: int,
    remote_offsets: Ints,
    local_offsets: Ints,
    lengths: Ints,
    /,
) -> int: ...
def progress(
    lanes: Sequence[Lane], timeout_s: float, /
) -> list[tuple[object, int, tuple[int, int, int] | None]]: ...

class Lane:
    evidence: str | None
    in_flight: int
    unsent: bool
    def __init__(self, fd: int) -> None: ...
    def post(
        self,
        item: object,
        header: bytes,
        writes: bool,
        base: int,
        ours: Ints,
        theirs: Ints,
        lengths: Ints,
        /,
    ) -> bool: ...
    def post_message(
        self,
        item: object,
        kind: int,
        immediate: int | None,
        transfer_id: int,
        oldest: int,
        token: bytes,
        address: int,
        offset: int,
        nbytes: int,
        /,
    ) -> bool: ...
    def push(self) -> bool: ...
    def close(self) -> list[object]: ...
    def abandon(self) -> None: ...
    def fileno(self) -> int: ...

class Server:
    def __init__(self, slice_bytes_max: int, slice_pieces_max: int, slices_max: int) -> None: ...
    def open_peer(self, name: str, /) -> int: ...
    def close_peer(self, peer_id: int, /) -> None: ...
    def attach(self, peer_id: int, fd: int, /) -> int: ...
    def detach(self, connection_id: int, /) -> None: ...
    def connections(self, peer_id: int, /) -> list[int]: ...
    def add_offer(
        self, token: bytes, to: str, address: int, nbytes: int, rights: int, /
    ) -> None: ...
    def withdraw_offer(self, token: bytes, /) -> None: ...
    def run(self, timeout_s: float, /) -> None: ...
    def wake(self) -> None: ...
    def take_events(self) -> list[tuple[int, int, int, object]]: ...
    def take_counters(self) -> tuple[int, int, int]: ...
    def answer(
        self, connection_id: int, status: int, payload: bytes, descriptor: int, /
    ) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...
