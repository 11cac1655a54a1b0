"""Types of the compiled part, `native.c`."""

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
