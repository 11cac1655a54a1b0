"""What is asked about tenants: to act for one, who there is, how much each may use."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.master.books.catalog import Catalog
from kvstore.master.transition import NEVER, Transition
from kvstore.wire import messages as m


class Tenancy:
    """Tenants and quotas; see `MasterPart`.

    Args:
        catalog: The pool's books.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._tenants = catalog.tenants

    def transitions(self) -> Mapping[type, Transition]:
        """Return what carries out which type of request."""
        return {
            m.Enter: self._enter,
            m.ListTenants: self._list,
            m.SetQuota: self._set_quota,
        }

    def advance(self, now: float) -> float:
        """Nothing is ever due."""
        del now
        return NEVER

    def _enter(self, request: m.Enter, now: float) -> m.Reply:
        del now
        tenant = self._tenants.find(request.tenant)
        may_be_nobody = request.tenant or not self._tenants.are_configured
        if tenant is None or not may_be_nobody or (tenant.name and tenant.token is None):
            return m.Refused(m.RefusalReason.UNKNOWN_TENANT, f"no tenant {request.tenant!r}")
        if not self._tenants.enter(request.client, tenant, request.token):
            return m.Refused(
                m.RefusalReason.WRONG_TOKEN, f"not the token of tenant {request.tenant!r}"
            )
        return m.Entered(tenant.name, tenant.quota_bytes, tenant.used_bytes)

    def _list(self, request: m.ListTenants, now: float) -> m.Reply:
        del request, now
        return m.TenantList(
            [
                m.TenantFigures(tenant.name, tenant.quota_bytes, tenant.used_bytes, tenant.blocks)
                for tenant in self._tenants
                if tenant.token is not None or tenant.used_bytes
            ]
        )

    def _set_quota(self, request: m.SetQuota, now: float) -> m.Reply:
        del now
        tenant = self._tenants.find(request.tenant)
        if tenant is None or not tenant.name:  # the pool is the limit of ""
            return m.Refused(m.RefusalReason.UNKNOWN_TENANT, f"no tenant {request.tenant!r}")
        tenant.quota_bytes = request.nbytes
        return m.Done(1)
