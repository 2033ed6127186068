"""Addresses of the public internet, which a server may connect to on behalf of a client."""

from __future__ import annotations

import ipaddress

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_SIX_TO_FOUR = ipaddress.IPv6Network("2002::/16")
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        (
            # Python's tables of special addresses grow with its versions; these may be missing.
            *("0.0.0.0/8", "100.64.0.0/10", "192.0.0.0/24", "192.88.99.0/24", "198.18.0.0/15"),
            *("240.0.0.0/4", "2001::/23", "2001:db8::/32", "3fff::/20", "5f00::/16"),
            "168.63.129.16/32",  # Azure's host, for its guests
        ),
    )
)


def is_public(text: str) -> bool:
    """Return whether ``text`` is an address of the public internet.

    Private, loopback, link-local, multicast and reserved addresses aren't, nor are IPv6 addresses
    that stand for such an IPv4 address.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            return False
        inner = _ipv4_in(address)
        if inner is not None:
            return _is_public(inner)
        if address not in _GLOBAL_UNICAST:
            return False
    return _is_public(address)


def _is_public(address: Address) -> bool:
    return (
        address.is_global
        and not address.is_multicast
        and not address.is_reserved
        and not any(address in each for each in _NOT_PUBLIC)
    )


def _ipv4_in(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address that packets to ``address`` may reach, None for none."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    if address in _SIX_TO_FOUR:
        return address.sixtofour
    return None
