"""Who may use how much of the pool, who does, and which client acts for whom.

A tenant is charged for the space of each of its copies from allocation until the space is free
again, also while a copy is retired or in quarantine. So the bytes of all tenants, "" among them,
are those of all copies.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore.eviction import RowQueue
from kvstore.master.books.copy_table import CopyTable
from kvstore.wire.messages import Pin

NOBODY: Final = 0  # number of the tenant ""
ENTERED_MAX: Final = 1 << 16  # clients kept in mind; who is forgotten enters again


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRule:
    """What is configured of one tenant.

    Attributes:
        name: Not "".
        token: What a client shows to act for it.
        quota_bytes: None: no limit.
    """

    name: str
    token: str = field(repr=False)
    quota_bytes: int | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Tenant:
    """One tenant's books.

    Attributes:
        number: In `CopyTable.tenant`.
        name: As on the wire.
        token: None: nobody can enter (the configuration does not know it).
        quota_bytes: None: no limit.
        orders: Its committed copies in the order of use, by pin; hard pins in none.
        used_bytes: Space of all its copies.
        blocks: Committed blocks.
    """

    number: int
    name: str
    token: str | None
    quota_bytes: int | None
    orders: tuple[RowQueue, RowQueue]
    used_bytes: int = 0
    blocks: int = 0

    def exceeds(self, nbytes: int) -> bool:
        """Tell whether so many bytes more are too many."""
        return self.quota_bytes is not None and self.used_bytes + nbytes > self.quota_bytes


class TenantBook:
    """All tenants. Not thread-safe.

    Args:
        table: The columns of their copies.
        rules: Who is configured. Nobody: every client is "", without a limit.
    """

    def __init__(self, table: CopyTable, rules: Sequence[TenantRule]) -> None:
        self._table = table
        self._tenants: list[Tenant] = []
        self._by_name: dict[str, Tenant] = {}
        self._entered: OrderedDict[str, Tenant] = OrderedDict()
        self.are_configured = bool(rules)
        self._add("", None, None)
        for rule in rules:
            assert rule.name not in self._by_name, rule.name
            self._add(rule.name, rule.token, rule.quota_bytes)

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants)

    def __getitem__(self, number: int) -> Tenant:
        return self._tenants[number]

    def named(self, name: str) -> Tenant:
        """Return a tenant; one that a node speaks of and nobody configured gets books too."""
        known = self._by_name.get(name)
        return self._add(name, None, None) if known is None else known

    def find(self, name: str) -> Tenant | None:
        """Return a tenant that has books."""
        return self._by_name.get(name)

    def enter(self, client: str, tenant: Tenant, token: str) -> bool:
        """Let a client act for a tenant if it shows the right token."""
        if tenant.number != NOBODY and (
            tenant.token is None or not hmac.compare_digest(tenant.token.encode(), token.encode())
        ):
            return False
        self._entered[client] = tenant
        self._entered.move_to_end(client)
        while len(self._entered) > ENTERED_MAX:
            self._entered.popitem(last=False)
        return True

    def acting(self, client: str) -> Tenant | None:
        """Return whom a client acts for; None if it has to enter first."""
        return self._entered.get(client) if self.are_configured else self._tenants[NOBODY]

    def forget(self, client: str) -> None:
        """A client acts for nobody any more."""
        self._entered.pop(client, None)

    # -- copies -------------------------------------------------------------------------------

    def order(self, row: int) -> None:
        """Take a committed copy into its tenant's order of use."""
        number, pin = self._table.tenant[row], self._table.pin[row]
        if number != NOBODY and pin != Pin.HARD:
            self._tenants[number].orders[pin].push(row)

    def disorder(self, row: int) -> None:
        """Take a committed copy out of it."""
        number, pin = self._table.tenant[row], self._table.pin[row]
        if number != NOBODY and pin != Pin.HARD:
            self._tenants[number].orders[pin].remove(row)

    def touch(self, row: int) -> None:
        """Count a use of a committed copy."""
        number, pin = self._table.tenant[row], self._table.pin[row]
        if number != NOBODY and pin != Pin.HARD:
            self._tenants[number].orders[pin].renew(row)

    def victim(self, tenant: Tenant) -> int | None:
        """Return the tenant's copy that should go next: its oldest that nobody reads.

        What is read is used: it becomes the youngest. So many of them are looked at, not more.
        """
        plain, soft = tenant.orders
        row = plain.oldest_where(self._is_idle)
        return soft.oldest_where(self._is_idle) if row is None else row

    def _is_idle(self, row: int) -> bool:
        return not self._table.leases[row]

    def _add(self, name: str, token: str | None, quota_bytes: int | None) -> Tenant:
        if self._tenants:  # "" comes first, and is in no order
            self._table.keep_tenants()
        older, newer = self._table.tenant_older, self._table.tenant_newer
        tenant = Tenant(
            number=len(self._tenants),
            name=name,
            token=token,
            quota_bytes=quota_bytes,
            orders=(RowQueue(older, newer), RowQueue(older, newer)),
        )
        self._tenants.append(tenant)
        self._by_name[name] = tenant
        return tenant
