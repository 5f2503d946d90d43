"""Read texts that are addresses, and say under which key an address is counted."""

from __future__ import annotations

import ipaddress
from functools import lru_cache

#: The key of all requests whose address cannot be read.
UNKNOWN_ADDRESS = "ip:unknown"
#: Maximum characters of a text that can be an address. The longest is an IPv6 address with a zone and a port.
LONGEST_ADDRESS = 100
#: The bits of an IPv6 address that name its /64 network.
_NETWORK_BITS = ~((1 << 64) - 1)


def address_key(text: str) -> str | None:
    """Return the key of the address in a text. The text can also have a port.

    Return None for any other text, such as the path of a unix socket.
    """
    # A longer text is not an address. Clients write this text, so do not fill the cache with long texts.
    return _address_key(text) if len(text) <= LONGEST_ADDRESS else None


@lru_cache(maxsize=8192)
def _address_key(text: str) -> str | None:
    address = read_address(text)
    if isinstance(address, ipaddress.IPv6Address):
        return f"ip:{ipaddress.IPv6Address(int(address) & _NETWORK_BITS)}/64"
    return None if address is None else f"ip:{address}"


def read_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address in a text such as "10.0.0.1" or "10.0.0.1:80"; None for any other text."""
    host, colon, port = text.partition(":")
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif colon and ":" not in port:
        text = host
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
