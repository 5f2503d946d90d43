"""Read texts that are addresses, and say under which key an address is counted.

Some IPv6 addresses contain an IPv4 address. They are read as this IPv4 address, wherever an address or network is read.
"""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple

#: The key of all requests whose address cannot be read.
UNKNOWN_ADDRESS = "ip:unknown"
#: The key that new addresses share while the memory of Redis is short.
SHARED_ADDRESS = "ip:shared"
#: The prefix lengths of the networks whose new addresses share a key.
_SHARED_PREFIXES = {4: 24, 6: 48}
#: Maximum characters of a text that can be an address. The longest is an IPv6 address with a zone and a port.
LONGEST_ADDRESS = 100
#: The bits of an IPv6 address that name its /64 network.
_NETWORK_BITS = ~((1 << 64) - 1)
_IPV4_BITS = (1 << 32) - 1


class _Form(NamedTuple):
    """A network of IPv6 addresses that contain an IPv4 address."""

    #: The first bits of the addresses as a number, and their number.
    first: int
    length: int
    #: The number of bits before the IPv4 address.
    begin: int = 96
    #: Whether each bit of the IPv4 address is inverted.
    inverted: bool = False
    #: Whether the client itself makes this address, to send IPv6 through an IPv4 network. Nobody translates it.
    tunnel: bool = False
    #: The length of the network around this one in which there are no other addresses; 0 if there is none.
    around: int = 0

    def ipv4(self, number: int) -> int:
        """Return the IPv4 address in an IPv6 address, both as numbers."""
        found = number >> (96 - self.begin) & 0xFFFF_FFFF
        return found ^ 0xFFFF_FFFF if self.inverted else found


#: NAT64 networks of an operator, such as those in 64:ff9b:1::/48, are not here: only the operator knows where in its
#: addresses the IPv4 address is (RFC 8215).
_FORMS = (
    _Form(0xFFFF, 96),  # IPv4-mapped ::ffff:0:0/96 (RFC 4291)
    _Form(0x64_FF9B << 64, 96, around=48),  # NAT64 64:ff9b::/96 (RFC 6052)
    _Form(0xFFFF_0000, 96),  # IPv4-translated ::ffff:0:0:0/96 (RFC 2765)
    _Form(0x2002, 16, begin=16, tunnel=True),  # 6to4 2002::/16 (RFC 3056)
    _Form(0x2001_0000, 32, inverted=True, tunnel=True),  # Teredo 2001::/32 (RFC 4380)
)


def address_key(text: str) -> str | None:
    """Return the key of the address in a text. The text can also have a port.

    Return None for any other text, such as the path of a unix socket.
    """
    # A longer text is not an address. Clients write this text, so do not fill the cache with long texts.
    return _address_key(text) if len(text) <= LONGEST_ADDRESS else None


@lru_cache(maxsize=8192)
def _address_key(text: str) -> str | None:
    address = read_address(text)
    if isinstance(address, IPv6Address):
        return f"ip:{IPv6Address(int(address) & _NETWORK_BITS)}/64"
    return None if address is None else f"ip:{address}"


def coarser_keys(key: str) -> tuple[str, ...]:
    """Return the keys that new addresses can share while memory is short, the finest first: of its network, and of all.

    Return none if `key` is not the key of an address.
    """
    network = network_of(key)
    return () if network is None else (network, SHARED_ADDRESS)


def network_of(key: str) -> str | None:
    """Return the key that the new addresses of a network share: "ip:203.0.113.0/24" for "ip:203.0.113.9".

    Return None if `key` is not the key of an address.
    """
    host = key.removeprefix("ip:").partition("/")[0]
    try:
        address = ip_address(host)
    except ValueError:
        return None
    return f"ip:{ip_network((host, _SHARED_PREFIXES[address.version]), strict=False)}"


def read_address(text: str, *, tunnels: bool = True) -> IPv4Address | IPv6Address | None:
    """Return the address in a text such as "10.0.0.1" or "10.0.0.1:80"; None for any other text.

    For an IPv6 address that contains an IPv4 address, return the IPv4 address (see `ipv4_in`).
    """
    host, colon, port = text.partition(":")
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif colon and ":" not in port:
        text = host
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return address if isinstance(address, IPv4Address) else ipv4_in(address, tunnels=tunnels) or address


def ipv4_in(address: IPv6Address, *, tunnels: bool = True) -> IPv4Address | None:
    """Return the IPv4 address in an IPv6 address; None if there is none.

    If `tunnels` is false, return None for the addresses of 6to4 and Teredo. Their IPv4 address is only a claim of the
    one who sends the packet, so it must not prove that somebody may be trusted.
    """
    number = int(address)
    form = _form_of(number, 128)
    if form is None or (form.tunnel and not tunnels):
        return None
    return IPv4Address(form.ipv4(number))


def ipv4_network_in(network: IPv6Network, *, tunnels: bool = True) -> IPv4Network | None:
    """Return the IPv4 network as which the addresses of an IPv6 network are read; None if they are read as IPv6.

    Raise ValueError if the addresses are read as IPv4 addresses, but as those of no network, or as all there are. For
    example, 2001:0:4136:e378::/64 has the clients of a server for Teredo, with any IPv4 addresses.
    """
    number = int(network.network_address)
    form = _form_of(number, network.prefixlen)
    if form is None or (form.tunnel and not tunnels):
        return None
    length = min(network.prefixlen - form.begin, 32)
    if length <= 0:
        raise ValueError(f"the addresses in {network} are read as IPv4 addresses")
    return IPv4Network((form.ipv4(number), length), strict=False)


def are_read_as_ipv4(network: bytes, length: int) -> bool:
    """Return whether the addresses of an IPv6 network (its first address, and its length) are read as IPv4."""
    return _form_of(int.from_bytes(network, "big"), length) is not None


def _form_of(number: int, length: int) -> _Form | None:
    """Return the form that all addresses of an IPv6 network have; None if there is no such form."""
    for form in _FORMS:
        if length >= (form.around or form.length) and number >> (128 - form.length) == form.first:
            return form
    return None
