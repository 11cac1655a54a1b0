"""Requests of one client to the master, which may have to be told again for whom it acts."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from kvstore.client.steps import Steps, ask
from kvstore.errors import MasterRefused, TenantRefused
from kvstore.wire import messages as m

if TYPE_CHECKING:
    from kvstore.client.tenant import Tenant

ReplyT = TypeVar("ReplyT", bound=m.Reply)

_OF_TENANTS = (
    m.RefusalReason.NOT_ENTERED,
    m.RefusalReason.UNKNOWN_TENANT,
    m.RefusalReason.WRONG_TOKEN,
)


class MasterAccess:
    """Thread-safe.

    Args:
        name: The client's incarnation.
        tenant: For whom it acts.
    """

    def __init__(self, name: str, tenant: Tenant) -> None:
        self._name = name
        self._tenant = tenant

    def enter(self, *, timeout_s: float | None = None) -> Steps[m.Entered]:
        """Tell the master for whom this client acts.

        Raises:
            TenantRefused: It does not know the tenant, or the token is another one.
        """
        request = m.Enter(self._name, self._tenant.name, self._tenant.token)
        try:
            return (yield from ask(request, m.Entered, timeout_s=timeout_s))
        except MasterRefused as error:
            raise self._explained(error) from error

    def ask(
        self, request: m.Request, expected: type[ReplyT], *, timeout_s: float | None = None
    ) -> Steps[ReplyT]:
        """Ask; enter first if the master does not know us, as after its restart.

        Raises:
            MasterUnavailable, Fenced, MasterRefused: As `MasterLink.ask`.
            TenantRefused: See `enter`.
        """
        try:
            return (yield from ask(request, expected, timeout_s=timeout_s))
        except MasterRefused as error:
            return (yield from self.ask_again(error, request, expected, timeout_s=timeout_s))

    def ask_again(
        self,
        error: MasterRefused,
        request: m.Request,
        expected: type[ReplyT],
        *,
        timeout_s: float | None = None,
    ) -> Steps[ReplyT]:
        """Enter and ask again what was refused with this error, if that may help. As `ask`."""
        if error.reason != m.RefusalReason.NOT_ENTERED or not self._tenant.name:
            raise self._explained(error) from error
        yield from self.enter(timeout_s=timeout_s)
        return (yield from ask(request, expected, timeout_s=timeout_s))

    def _explained(self, error: MasterRefused) -> MasterRefused | TenantRefused:
        if error.reason in _OF_TENANTS:
            return TenantRefused(tenant=self._tenant.name, reason=error.reason)
        return error
