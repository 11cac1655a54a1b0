"""The master's end of posted puts: what is in a client's memory is stored before it is looked at.

    client   claims a key ─▶ copies, leaves the node a note ─▶ posts ─▶ stored (nobody was asked)
    master   before it handles any request: takes all posts, and makes blocks of them

Why a post counts as if the master had answered `Store`:

- Whoever asks afterwards is answered after the post was taken. If the master dies first, the node
  has the note, and tells the next one; a put is taken for posted only if this master was there, and
  led, after the post.
- The key was free: the master has a word for each key of a block or of a put under way
  (`kvstore/compiled/taken_keys.c`), and so has a client for its own. Before the master decides
  about a key itself it announces it; a client that has claimed it is stopped, and its put asked
  for.
- The place was the client's: before places may go to others (a put too slow, a node that leaves, a
  fence, another master's time) the generation of all is raised, and what was posted is taken.
- While the master may not know all blocks yet, or does not lead, nothing can be posted.

Of a batch its end is posted: its keys and places are its own since the master granted them, and
what takes places from a client, or may end its batch, raises the generation first.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvstore import row_loops
from kvstore.mailbox import clock_name
from kvstore.master.store_master import StoreMaster
from kvstore.wire import messages as m
from kvstore.wire.granted import encode

if TYPE_CHECKING:
    from kvstore._rows import PostOffice

CLIENT: Final = ".client"  # how the identity of a client's way to its master ends
HEAD_BYTES: Final = 4096
BUCKET_BYTES: Final = 64
RING_BYTES: Final = 49152
BUCKETS_MIN: Final = 1 << 15
FULL: Final = 4 / 7  # of the words: buckets of seven overflow from here on
DOZE_S: Final = 0.01  # so soon the master looks again while puts are posted
AWAKE_S: Final = 0.2  # since the last one
NUMBERS: Final = 1 << 16
STORE, ORDER, FINISH = 1, 2, 3  # as `kvstore/compiled/post_ring.c` has them
LEADS_NS_MAX: Final = (1 << 63) - 1
# What takes no place from anybody and tells of no blocks: puts under way may go on beside it.
_HARMLESS: Final = frozenset(
    (m.Lookup, m.Renew, m.Release, m.Allocate, m.Finish, m.Store, m.Reserve, m.Exists, m.Remove,
     m.SetPin, m.Heartbeat, m.Observe, m.Describe, m.Enter)
)  # fmt: skip
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


End = tuple[str, int, bytes, int]  # client, number of a batch, checksums, blocks


class Posts:
    """Puts that clients of this host post to one term of a master. Not thread-safe.

    Args:
        master: Whose blocks they become.
        wakeup: An eventfd; who writes to it has posts taken.
    """

    def __init__(self, master: StoreMaster, wakeup: int) -> None:
        self._master = master
        self._wakeup = wakeup
        self._clients: dict[int, str] = {}  # number -> incarnation
        self._rings: dict[int, int] = {}  # number -> descriptor
        self._said = False, 0
        self._looks = self._takes_places = self._is_deciding = False
        self._taken_s = -math.inf
        self._process = os.pidfd_open(os.getpid())
        try:
            self._keys, self._office = self._new_office()
        except OSError:
            os.close(self._process)
            raise

    @staticmethod
    def possible() -> bool:
        """Whether this process can take posts."""
        return row_loops.compiled is not None

    # -- clients ------------------------------------------------------------------------------

    def lend(self, identity: str, number: int) -> list[int]:
        """Return what a client posts with: descriptors, which stay ours; none if it cannot.

        Args:
            identity: Of its connection.
            number: Of the loan.
        """
        number %= NUMBERS
        if not identity.endswith(CLIENT) or not number or number in self._clients:
            return []
        ring = _memory("posts", RING_BYTES)
        if not self._office.add(ring, number):
            os.close(ring)
            return []
        self._clients[number] = identity.removesuffix(CLIENT)
        self._rings[number] = ring
        return [self._keys, ring, self._wakeup, self._process]

    def end(self, number: int) -> None:
        """A client is gone. Unknown ones are ignored."""
        number %= NUMBERS
        if number in self._clients:
            self._office.drop(number)
            self.take()
            del self._clients[number]
            os.close(self._rings.pop(number))

    def close(self) -> None:
        """Take what was posted; nothing more can be."""
        self._office.close()
        self.take()
        for number in list(self._clients):
            self.end(number)
        self._master.mirror_keys(None)
        os.close(self._keys)
        os.close(self._process)

    # -- requests -----------------------------------------------------------------------------

    def before(self, request: m.Request, now: float) -> None:
        """Take what was posted before a request is handled; `after` follows in any case.

        Until then nobody claims the keys that it is about, nor one that it lets go of: a put that
        ends is a block a moment later.
        """
        if not self._clients:
            return
        self._takes_places = type(request) not in _HARMLESS or self._master.takes_places(now)
        if self._takes_places:
            self._office.revoke()
        self.take()
        if type(request) is m.Allocate:
            self._announce(request.keys)
        else:
            self._announce((request.key,) if type(request) is m.Store else ())

    def after(self) -> None:
        """A request was handled."""
        self._office.retract()
        self._is_deciding = False
        if self._takes_places:  # what was ordered after the revocation was opened, and taken, too
            self._takes_places = False
            self._office.revoke()
        self.tell()

    def tell(self) -> None:
        """Tell clients of the places that were opened for them."""
        for wish, granted in self._master.take_grants():
            self._office.grant(wish.poster, wish.numbers[0], wish.length, encode(granted))

    def say(self, *, may_post: bool, leads_until_s: float) -> None:
        """Tell clients whether all blocks are known, and until when this master leads.

        Args:
            may_post: They are.
            leads_until_s: Of the monotonic clock.
        """
        leads_ns = LEADS_NS_MAX if leads_until_s == math.inf else int(leads_until_s * 1e9)
        if (may_post, leads_ns) != self._said:
            self._said = may_post, leads_ns
            self._office.say(may_post, leads_ns)

    def doze(self, now: float) -> float | None:
        """Take what is posted, and return after how many seconds to do so again, unwoken.

        None: who posts next wakes us. To be called by who sleeps then, and calls this again.

        Args:
            now: Of the monotonic clock.
        """
        if self.take():
            self._taken_s = now
        dozes = now - self._taken_s < AWAKE_S
        if dozes:
            self._office.look_at(int((now + DOZE_S) * 1e9))
            self._looks = True
        elif self._looks:
            self._office.look_at(0)
            self._looks = False
            if self.take():  # it came before we said so, and woke nobody
                return 0.0
        return DOZE_S if dozes else None

    def take(self) -> bool:
        """Make blocks of what was posted; False if there was nothing."""
        posted = self._office.take()
        if posted is None:
            return False
        clients, stored = self._clients, []
        ended: list[End] = []
        try:
            for number, kind, key, batch, length, checksum, count in posted:
                if kind == STORE:
                    stored.append((clients[number], key, batch, length, checksum))
                elif kind == FINISH:
                    ended.append((clients[number], batch, key, count))
                elif kind == ORDER:
                    self._master.take_order(clients[number], batch, count, length, number)
            self._master.take_posts(stored)
            if ended:
                self._take_ends(ended)
        finally:
            self._office.release()
        return bool(posted)

    def _take_ends(self, ended: Sequence[End]) -> None:
        """Make blocks of batches; until all of a batch are, nobody takes its keys for free."""
        is_deciding = self._is_deciding
        if not is_deciding:
            self._office.announce(())
        try:
            for client, batch, checksums, count in ended:
                self._master.take_end(client, batch, checksums, count)
        finally:
            if not is_deciding:
                self._office.retract()

    @property
    def is_crowded(self) -> bool:
        """Whether there are more keys than words for them, nearly."""
        return self._office.used > FULL * self._office.room

    def _announce(self, keys: Sequence[bytes]) -> None:
        office = self._office
        self._is_deciding = True
        rivals = office.announce(keys)
        if rivals:
            for number in rivals:
                office.stop(number)
            self.take()
            office.clear(keys, rivals)

    def _new_office(self) -> tuple[int, PostOffice]:
        compiled = row_loops.compiled
        assert compiled is not None
        wanted = max(BUCKETS_MIN, self._master.num_keys // 2)
        buckets = 1 << (wanted - 1).bit_length()
        keys = _memory("taken keys", HEAD_BYTES + buckets * BUCKET_BYTES)
        try:
            office = compiled.PostOffice(keys, clock_name().encode())
        except OSError:
            os.close(keys)
            raise
        self._master.mirror_keys(office)
        return keys, office


def _memory(what: str, nbytes: int) -> int:
    """Return a descriptor of fresh memory, zero, whose size stays."""
    made = os.memfd_create(f"moe-runtime-{what}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(made, nbytes)
        fcntl.fcntl(made, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(made)
        raise
    return made
