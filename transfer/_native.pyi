"""Types of the compiled part, `native.c`."""

from collections.abc import Callable, Sequence

from transfer.memory.region import Region
from transfer.pieces import Ints
from transfer.priority import Priority

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
def num_urgent() -> int: ...
def num_turns_taken() -> int: ...
def hurry() -> bool: ...

class CallLine:
    def __init__(self, num_threads: int) -> None: ...
    def put(
        self,
        number: int,
        fd: int,
        writes: bool,
        block: int,
        file_bytes: int,
        deadline_ns: int,
        memory: int,
        offsets: Ints,
        lengths: Ints,
        bounds: Ints,
        lows: Ints,
        highs: Ints,
        /,
    ) -> None: ...
    def take(self, lane: int, /) -> tuple[int, int, int, int] | None: ...
    def stop(self, number: int, /) -> bool: ...
    def call(self) -> None: ...
    def close(self) -> None: ...
    def hold(self, low: int, high: int, deadline_ns: int, /) -> bool: ...
    def let_go(self, low: int, high: int, /) -> None: ...

class Lane:
    urgent: bool
    evidence: str | None
    in_flight: int
    leader: int
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
        note: bytes = b"",
        /,
    ) -> bool: ...
    def bind(self, epoll: int, change: Callable[[int], None], /) -> None: ...
    def unbind(self) -> None: ...
    def claim(self) -> bool: ...
    def leave(self, leader: int, /) -> bool: ...
    def attend(self) -> None: ...
    def gives_way(self) -> bool: ...
    def watch_all(self) -> None: ...
    def attend_to_posted(self) -> bool: ...
    def close(self) -> list[object]: ...
    def abandon(self) -> None: ...
    def fileno(self) -> int: ...

class RailLoad:
    open: bool
    healthy: bool
    attends_soon: bool
    out_bytes: int
    urgent_bytes: int
    messages_done: int
    bytes_done: int
    progressed_at: float
    bandwidth: float
    bulk_bytes_max: int
    bulk_bytes_max_beside_urgent: int
    def add(self, nbytes: int, urgent: bool, /) -> None: ...
    def bind(
        self,
        link: object,
        rail: object,
        attend_soon: Callable[[], None],
        report: Callable[[list[tuple[object, int, tuple[int, int, int] | None]], Lane], None],
        /,
    ) -> None: ...
    def carry(self, urgent: Lane | None, bulk: tuple[Lane, ...], all_bulk: bool, /) -> None: ...

class Message:
    peer: str
    operation: str
    nbytes: int
    bytes_moved: int
    deadline: float
    started: float
    rail: object
    pending: bool
    writes: bool
    urgent: bool
    transfer_id: int
    oldest: int
    our_offset: int
    their_offset: int
    immediate: int | None
    note: bytes | None
    priority: Priority
    region: Region
    token: bytes
    rails: tuple[tuple[int, ...], ...]
    load: RailLoad
    lane: Lane
    def wait(self, timeout_s: float | None = None) -> None: ...

class MappedWindow:
    nbytes: int
    rights: int
    start: int
    live: bool

class MappedCopy:
    peer: str
    operation: str
    nbytes: int
    bytes_moved: int
    deadline: float
    started: float
    def wait(self, timeout_s: float | None = None) -> None: ...

class Books:
    num_queued: int
    urgent_queued: int
    stopped: bool
    awaited: bool
    urgent_at: float
    ahead_max: int
    oldest: int
    is_exhausted: bool
    def __init__(
        self,
        ahead_max: int,
        rails: tuple[RailLoad, ...] = (),
        prefer: Callable[[Region], tuple[tuple[int, ...], ...]] | None = None,
        on_room: Callable[[], None] | None = None,
    ) -> None: ...
    def take(self) -> int: ...
    def end(self, number: int, /) -> None: ...
    def messages(self) -> list[Message]: ...
    def stop(self) -> list[Message]: ...
    def pull(self, message: Message, /) -> bool: ...
    def __len__(self) -> int: ...

class ShortWay:
    timeout_s: float
    on_post: Callable[[], None] | None
    def __init__(
        self,
        region: type,
        key: type,
        made: type[Message],
        copied: type[MappedCopy],
        priorities: tuple[Priority, ...],
        nbytes_max: int,
        slice_bytes: int,
        urgent_bytes_max: int,
    ) -> None: ...
    def post(
        self,
        writes: bool,
        peer: str,
        region: object,
        key: object,
        our_offset: object,
        their_offset: object,
        nbytes: object,
        immediate: object,
        priority: object,
        note: object = None,
        /,
    ) -> Message | MappedCopy | None: ...
    def add(self, peer: str, books: Books, /) -> None: ...
    def remove(self, peer: str, books: Books, /) -> None: ...
    def take_counts(self) -> tuple[int, int, int, tuple[int, ...], tuple[int, ...]]: ...
    def map(self, peer: str, link: object, windows: dict[bytes, MappedWindow], /) -> None: ...
    def unmap(self, peer: str, link: object, /) -> None: ...
    def take_copied(self) -> tuple[int, int, int, tuple[int, ...], tuple[int, ...]]: ...

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
    def take_notes(self) -> list[tuple[str, int, bytes]]: ...
    def take_counters(self) -> tuple[int, int, int]: ...
    def answer(
        self, connection_id: int, status: int, payload: bytes, descriptor: int, /
    ) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...

class LocalLine:
    def __init__(self, descriptor: int, board: int = -1) -> None: ...
    def ask(self, request: bytes, deadline_s: float, reply_bytes_max: int, /) -> bytes | None: ...
    def send(self, request: bytes, deadline_s: float, /) -> bool | None: ...
    def receive(self, deadline_s: float, reply_bytes_max: int, /) -> bytes: ...

class LocalCallers:
    def __init__(self, epoll: int, receive_bytes: int) -> None: ...
    def wait(self, timeout_s: float, /) -> list[tuple[int, int, bytes | None]]: ...
    def set_plain(self, descriptor: int, plain: bool, /) -> None: ...
    def set_board(self, descriptor: int, memory: int, /) -> bool: ...
    def send(self, descriptor: int, payload: bytes, /) -> int: ...
