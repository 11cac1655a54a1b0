"""Events into the membership machine, instructions out of it, and its intervals.

The machine (`elastic.membership`) only maps one to the other; `elastic.coordinator` turns what
happens into events and carries the instructions out, in their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic.evidence import Evidence
from elastic.messages import Message
from elastic.view import View


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Intervals of the machine, in seconds.

    Attributes:
        gather_s: A proposal waits this long for more losses, so that two at once make one view.
        follow_s: How long an accused or informed member waits for its accuser's view.
        probe_s: How long a suspect by deadline has to answer a probe.
        minority_s: Head start of the other side when fewer than half are left without proof.
        overtaken_s: An offer of an unknown epoch makes the record be read after this.
        install_s: Deadline for all members to be ready for a view.
        first_install_s: The same for the first view, when everybody loads everything.
        quiet_s: After an own stall, deadlines accuse nobody for this long.
        retry_s: Pause before the store is asked again what it did not answer.
    """

    gather_s: float = 0.002
    follow_s: float = 0.1
    probe_s: float = 0.25
    minority_s: float = 0.5
    overtaken_s: float = 0.02
    install_s: float = 20.0
    first_install_s: float = 60.0
    quiet_s: float = 1.0
    retry_s: float = 0.2


# --- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Suspected:
    """This process has evidence against these incarnations; those not in the view are ignored."""

    incarnations: tuple[str, ...]
    evidence: Evidence


@dataclass(frozen=True, slots=True)
class PassDropped:
    """The pass under way can't complete: even without suspects a new epoch is needed."""


@dataclass(frozen=True, slots=True)
class OwnStall:
    """This process did not run for a while."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message came from this incarnation."""

    sender: str
    message: Message


@dataclass(frozen=True, slots=True)
class RecordRead:
    """The view record, as just read (None: there is none)."""

    view: View | None


@dataclass(frozen=True, slots=True)
class RecordUnread:
    """The store did not answer `ReadRecord`: it is to be asked again."""


@dataclass(frozen=True, slots=True)
class ProposalAnswered:
    """The store's answer to `Propose`: won if `stored` equals `proposed`."""

    proposed: View
    stored: View


@dataclass(frozen=True, slots=True)
class Prepared:
    """`Prepare` was done; the receive-window offers by rank."""

    epoch: int
    offers: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class Loaded:
    """`Load` was done: this rank's experts of the epoch's view are in memory."""

    epoch: int


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """This process wants out."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing else is waiting; intervals may have passed."""


Event = (
    Suspected
    | PassDropped
    | OwnStall
    | Received
    | RecordRead
    | RecordUnread
    | ProposalAnswered
    | Prepared
    | Loaded
    | LeaveAsked
    | Tick
)

# --- instructions -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Notify each of these incarnations; one that cannot be reached is skipped."""

    to: tuple[str, ...]
    message: Message


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """Read the view record; answer with `RecordRead`."""


@dataclass(frozen=True, slots=True)
class Propose:
    """Compare-and-set the record to this view; answer with `ProposalAnswered`."""

    view: View


@dataclass(frozen=True, slots=True)
class Fence:
    """Cut these incarnations off for good."""

    incarnations: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Adopt:
    """A view was committed: tell whom it concerns, connect to members not connected yet."""

    view: View


@dataclass(frozen=True, slots=True)
class Prepare:
    """Make receive windows for this view; answer with `Prepared`."""

    view: View


@dataclass(frozen=True, slots=True)
class Load:
    """Bring this rank's experts into memory; answer with `Loaded`."""

    view: View


@dataclass(frozen=True, slots=True)
class Install:
    """All members are ready: passes of this epoch may start."""

    view: View
    offers: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class Depart:
    """This incarnation is out: evicted by this view, or left by it as it `asked` to."""

    view: View
    asked: bool


Instruction = Send | ReadRecord | Propose | Fence | Adopt | Prepare | Load | Install | Depart
