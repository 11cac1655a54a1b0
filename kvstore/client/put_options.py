"""How blocks are to be stored."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from kvstore.client.chain import Chain
from kvstore.errors import InvalidValue
from kvstore.wire.messages import Medium, Pin

REPLICAS_MAX: Final = 8
LABEL_MAX: Final = 64
CHUNK_BYTES_MAX: Final = (1 << 63) - 1
MEDIA: Final = frozenset(Medium)


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOptions:
    """Of all blocks of one put.

    Attributes:
        pin: SOFT is evicted only if nothing else can be, and ends by itself; HARD never is.
        pin_s: How long a soft pin lasts; 0 is the master's default.
        group: Blocks that are pinned and removed together; "" is no group.
        replicas: Copies wanted, on different failure domains. Fewer are accepted if there are
            not so many; the block is stored once it has one.
        chunk_bytes: Parts that can be read and verified alone; 0: only the whole block can. It
            is a part of what the block is: the same bytes in other parts are a `CONFLICT`.
        media: Where the first copy may go, best first; empty: as the master decides.
        prefer: Names of nodes to try first.
        wait_for_space: Ask again, within the call's deadline, while there is no space.
        chain: What the blocks are, in the order of the put's keys, for subscribers of events.
    """

    pin: Pin = Pin.NONE
    pin_s: float = 0.0
    group: str = ""
    replicas: int = 1
    chunk_bytes: int = 0
    media: tuple[Medium, ...] = ()
    prefer: tuple[str, ...] = ()
    wait_for_space: bool = False
    chain: Chain | None = None

    def __post_init__(self) -> None:
        _check_types(self)
        if not 1 <= self.replicas <= REPLICAS_MAX:
            problem = f"replicas must be in [1, {REPLICAS_MAX}], not {self.replicas}"
            raise InvalidValue(problem=problem)
        if not 0 <= self.chunk_bytes <= CHUNK_BYTES_MAX:
            problem = f"chunk_bytes must be in [0, {CHUNK_BYTES_MAX}], not {self.chunk_bytes}"
            raise InvalidValue(problem=problem)
        if not 0 <= self.pin_s < math.inf:
            problem = f"pin_s must be a number of seconds from 0 on, not {self.pin_s}"
            raise InvalidValue(problem=problem)
        check_group(self.group)


def _check_types(options: PutOptions) -> None:
    """Refuse here what a master would refuse, or take for something else."""
    good = {
        "pin": (isinstance(options.pin, Pin), "a kvstore.Pin"),
        "replicas": (type(options.replicas) is int, "an integer"),
        "chunk_bytes": (type(options.chunk_bytes) is int, "an integer"),
        "pin_s": (isinstance(options.pin_s, int | float), "a number of seconds"),
        "wait_for_space": (isinstance(options.wait_for_space, bool), "True or False"),
        "chain": (options.chain is None or isinstance(options.chain, Chain), "a kvstore.Chain"),
        # A single name would be taken for its letters.
        "media": (
            _are_texts(options.media) and set(options.media) <= MEDIA,
            "a tuple of kvstore.Medium",
        ),
        "prefer": (_are_texts(options.prefer), "a tuple of nodes' names"),
    }
    for name, (is_good, expected) in good.items():
        if not is_good:
            seen = f"{getattr(options, name)!r:.40}"
            raise InvalidValue(problem=f"options of a put: {name} is {expected}, not {seen}")


def _are_texts(values: object) -> bool:
    return isinstance(values, tuple | list) and all(isinstance(value, str) for value in values)


def check_options(options: PutOptions) -> None:
    """Raise InvalidValue if these are none."""
    if not isinstance(options, PutOptions):
        raise InvalidValue(problem=f"options are PutOptions, not {options!r:.40}")


def check_group(group: str) -> None:
    """Raise InvalidValue if this cannot be the name of a group."""
    if not isinstance(group, str):
        raise InvalidValue(problem=f"a group's name is text, not {group!r:.40}")
    if len(group) > LABEL_MAX:
        problem = f"a group's name has at most {LABEL_MAX} characters, not {len(group)}"
        raise InvalidValue(problem=problem)
    try:
        group.encode()
    except UnicodeEncodeError as error:
        raise InvalidValue(problem=f"a group's name that is no UTF-8: {group!r:.40}") from error


DEFAULT: Final = PutOptions()


def is_plain(options: PutOptions) -> bool:
    """Tell whether a value can be stored in one request as far as its options go."""
    if options is DEFAULT:
        return True
    check_options(options)
    unusual = options.chunk_bytes or options.media or options.prefer or options.chain
    return options.replicas == 1 and not unusual
