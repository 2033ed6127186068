"""Accounting of a limited resource by client address, and the choice of the holding to evict first.

The address with the most gives up its oldest holding. So one address can't shut others out. If all
clients share one address, as behind a proxy or on a Unix socket, the oldest holding goes. A limit
for each address, which a proxy would soon reach, isn't needed.
"""

from __future__ import annotations

import ipaddress
from typing import Generic, TypeVar

import attrs

_PREFIX = 64
"""Bits of an IPv6 address that identify a network; a client may own all addresses below them."""

Holder = TypeVar("Holder")


def address_of(client: tuple[str, int] | None) -> str:
    """Return the address under which a client's holdings are counted; empty on a Unix socket."""
    if client is None:
        return ""
    text = client[0].partition("%")[0]
    if ":" not in text:
        return text
    address = ipaddress.IPv6Address(text)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, _PREFIX), strict=False).network_address)


@attrs.define(eq=False)
class _Account(Generic[Holder]):
    """The holdings of one address, the oldest first."""

    total: int = 0
    amounts: dict[Holder, int] = attrs.field(factory=dict)


@attrs.define(eq=False)
class Holdings(Generic[Holder]):
    """Amounts by holder, and holders by address. It only counts."""

    total: int = 0
    _accounts: dict[str, _Account[Holder]] = attrs.field(factory=dict)
    _addresses: dict[Holder, str] = attrs.field(factory=dict)

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, address: str, holder: Holder, amount: int) -> None:
        """Add ``amount`` to what ``holder`` holds. Its age is that of its first amount."""
        self._addresses[holder] = address
        account = self._accounts.setdefault(address, _Account())
        account.amounts[holder] = account.amounts.get(holder, 0) + amount
        account.total += amount
        self.total += amount

    def remove(self, holder: Holder, amount: int | None = None) -> None:
        """Subtract ``amount``, or everything, from what ``holder`` holds, which may be nothing."""
        address = self._addresses.get(holder)
        if address is None:
            return
        account = self._accounts[address]
        held = account.amounts[holder]
        amount = held if amount is None else min(amount, held)
        account.total -= amount
        self.total -= amount
        if amount < held:
            account.amounts[holder] = held - amount
            return
        del account.amounts[holder], self._addresses[holder]
        if not account.amounts:
            del self._accounts[address]

    def first_to_go(self) -> Holder | None:
        """Return the oldest holder of the address that holds the most; None if there is none."""
        if not self._accounts:
            return None
        heaviest = max(self._accounts.values(), key=lambda account: account.total)
        return next(iter(heaviest.amounts))
