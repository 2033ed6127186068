"""A limit of concurrent slow operations, shared fairly between tenants."""

from __future__ import annotations

import attrs
import trio


@attrs.define(eq=False)
class _Waiter:
    """A holder of a permit, or a task that waits for one."""

    tenant: str
    cost: int
    granted: trio.Event = attrs.field(factory=trio.Event)


@attrs.define(eq=False)
class _Tenant:
    """The waiters of one tenant, in the order of their arrival."""

    waiting: list[_Waiter] = attrs.field(factory=list)
    oldest_next: bool = False
    """True if the oldest waiter is next, False for the cheapest."""


class FairLimiter:
    """A limited number of permits, shared fairly between tenants.

    Tenants take turns. Within a tenant, the cheapest and the oldest waiter alternate, so that a
    cheap one doesn't wait for all expensive ones and an expensive one doesn't wait for ever.

    Args:
        max_permits: Number of permits.
        max_per_tenant: Most permits of one tenant; the tenant ``""`` may have all.
        max_expensive: Most permits of expensive holders together.
        expensive_above: Cost above which a holder is expensive, in the unit of ``acquire``.
    """

    def __init__(
        self, max_permits: int, *, max_per_tenant: int, max_expensive: int, expensive_above: int
    ) -> None:
        self._max_permits = max_permits
        self._max_per_tenant = max_per_tenant
        self._max_expensive = max_expensive
        self._expensive_above = expensive_above
        self._tenants: dict[str, _Tenant] = {}
        """Tenants with waiters; the next one is first."""
        self._held: dict[object, _Waiter] = {}

    @property
    def num_held(self) -> int:
        """Number of permits in use."""
        return len(self._held)

    async def acquire(self, holder: object, tenant: str, cost: int) -> None:
        """Block until ``holder`` has a permit, which it keeps until :meth:`release`."""
        waiter = _Waiter(tenant, cost)
        self._tenants.setdefault(tenant, _Tenant()).waiting.append(waiter)
        self._grant()
        try:
            await waiter.granted.wait()
        except BaseException:
            self._leave(waiter)
            raise
        self._held[holder] = self._held.pop(waiter)

    def release(self, holder: object) -> None:
        """Release the permit of ``holder``."""
        del self._held[holder]
        self._grant()

    def _leave(self, waiter: _Waiter) -> None:
        if self._held.pop(waiter, None) is None:
            self._remove(waiter)
        self._grant()

    def _remove(self, waiter: _Waiter) -> None:
        tenant = self._tenants[waiter.tenant]
        tenant.waiting.remove(waiter)
        if not tenant.waiting:
            del self._tenants[waiter.tenant]

    def _grant(self) -> None:
        while (waiter := self._next()) is not None:
            tenant = self._tenants.pop(waiter.tenant)
            tenant.waiting.remove(waiter)
            tenant.oldest_next = not tenant.oldest_next
            if tenant.waiting:
                self._tenants[waiter.tenant] = tenant
            self._held[waiter] = waiter
            waiter.granted.set()

    def _next(self) -> _Waiter | None:
        """Return the waiter that gets the next permit, None if there is none."""
        held = self._held.values()
        if len(held) >= self._max_permits:
            return None
        takes_expensive = (
            sum(each.cost > self._expensive_above for each in held) < self._max_expensive
        )
        for name, tenant in self._tenants.items():
            if name and sum(each.tenant == name for each in held) >= self._max_per_tenant:
                continue
            waiting = [
                each
                for each in tenant.waiting
                if takes_expensive or each.cost <= self._expensive_above
            ]
            if waiting:
                return waiting[0] if tenant.oldest_next else min(waiting, key=_cost)
        return None


def _cost(waiter: _Waiter) -> int:
    return waiter.cost
