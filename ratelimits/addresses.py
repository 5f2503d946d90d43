"""Find the address of the client of a request, and say under which key an address is counted.

Proxies of the project can be between the client and the app. Some IPv6 addresses contain an IPv4 address. They are read
as this IPv4 address, wherever an address or network is read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache, lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, NamedTuple

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.http import HttpRequest

from ratelimits.conf import conf, shown
from ratelimits.conf.setting_rules import UNIX, complaint

# Projects can configure this name, which is older than this module.
logger = logging.getLogger("ratelimits.addresses.proxies")

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
#: Maximum number of entries that are read from the end of a header, if no setting says how many proxies there are.
_MAX_PROXIES = 32
_warned = False


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


@cache
def proxies() -> int | None:
    """Return the number of trusted proxies: RATELIMITS["NUM_PROXIES"], or else DRF's NUM_PROXIES.

    Return None if both are None. Raise ImproperlyConfigured if DRF's setting is not valid. The result is cached until
    the settings change.
    """
    configured: int | None = conf.NUM_PROXIES
    if configured is None:
        # Read DRF's setting without DRF: a project perhaps uses only the middleware and the decorator.
        configured = (getattr(settings, "REST_FRAMEWORK", None) or {}).get("NUM_PROXIES")
        if configured is not None and (hint := complaint("NUM_PROXIES", configured)):
            raise ImproperlyConfigured(f"REST_FRAMEWORK['NUM_PROXIES'] is {shown(configured)}. {hint}")
    return configured


@cache
def trusts_no_proxy() -> bool:
    """Return whether no proxy is trusted, so that REMOTE_ADDR is the client's address. The result is cached."""
    return not conf.TRUSTED_PROXIES and not proxies()


def _forget_proxies(*, setting: str, **kwargs: object) -> None:
    if setting in ("RATELIMITS", "REST_FRAMEWORK"):
        proxies.cache_clear()
        trusts_no_proxy.cache_clear()


setting_changed.connect(_forget_proxies)


def address_of(request: HttpRequest) -> str:
    """Return the client's address as a key: an IPv4 address, or the /64 network of an IPv6 address.

    Clients can write X-Forwarded-For. So the entry that a trusted proxy has written is used: the last entry if there is
    one trusted proxy, the second-last entry if there are two. With TRUSTED_PROXIES, the header is used only if one of
    these proxies sends the request. All requests without a readable address share the key UNKNOWN_ADDRESS. Without a
    key, no limit by address would apply to them.
    """
    meta = request.META
    remote: str | None = meta.get("REMOTE_ADDR")
    address = None
    if conf.TRUSTED_PROXIES:
        address = _from_trusted_proxy(meta, remote or "", tuple(conf.TRUSTED_PROXIES))
    elif (trusted := proxies()) and (forwarded := meta.get("HTTP_X_FORWARDED_FOR")):
        # The text can be long, since clients write it. So do not split all of it.
        last_entries = forwarded.rsplit(",", trusted)
        from_end = min(trusted, len(last_entries))  # if there are fewer entries than proxies, take the first entry
        address = address_key(last_entries[-from_end].strip())
    if address is None and remote:
        address = address_key(remote)
    return address or unknown(remote)


def _from_trusted_proxy(meta: Mapping[str, Any], remote: str, trusted_proxies: tuple[str, ...]) -> str | None:
    """Return the client's address in ADDRESS_HEADER.

    Return None if the header has no address, or if the request does not come from a trusted proxy.

    Each proxy adds the address of its client at the end. So the last entry that is not a trusted proxy is the client.
    """
    header = meta.get(f"HTTP_{conf.ADDRESS_HEADER.upper().replace('-', '_')}")
    if not header or not _is_trusted(remote[:LONGEST_ADDRESS], trusted_proxies):
        return None
    address = None
    # The text can be long, since clients write it. So do not split all of it.
    last_entries = header.rsplit(",", _MAX_PROXIES)[-_MAX_PROXIES:]  # without the rest, which was not split
    for entry in reversed(last_entries):
        address = address_key(entry.strip())
        if address is None or not _is_trusted(entry.strip(), trusted_proxies):
            break
    return address


@lru_cache(maxsize=8192)
def _is_trusted(text: str, trusted_proxies: tuple[str, ...]) -> bool:
    """Return whether an address belongs to a trusted proxy. A text without an address stands for a unix socket."""
    # Who makes a tunnel can write any IPv4 address into its own address, so this address opens nothing.
    address = read_address(text, tunnels=False)
    if address is None:
        return UNIX in trusted_proxies
    return any(address in network for network in proxy_networks(trusted_proxies))


@cache
def proxy_networks(trusted_proxies: tuple[str, ...]) -> list[IPv4Network | IPv6Network]:
    """Return the networks in TRUSTED_PROXIES, read as addresses are read.

    Raise ImproperlyConfigured for an IPv6 network that stands for all IPv4 addresses: it would trust every client.
    """
    networks = []
    for proxy in trusted_proxies:
        if proxy == UNIX:
            continue
        network = ip_network(proxy, strict=False)
        try:
            inner = ipv4_network_in(network, tunnels=False) if isinstance(network, IPv6Network) else None
        except ValueError as error:
            raise ImproperlyConfigured(
                f"RATELIMITS['TRUSTED_PROXIES'] has the network {shown(proxy)}, which stands for all IPv4 addresses."
                " Write IPv4 networks, such as '10.0.0.0/8'."
            ) from error
        networks.append(inner or network)
    return networks


def unknown(remote: str | None) -> str:
    """Return UNKNOWN_ADDRESS. The first time in this process, log how to configure the proxies."""
    global _warned
    if not _warned:
        _warned = True
        logger.warning(
            "A request came without a client address that can be read (REMOTE_ADDR is %.100r). All such requests are"
            " counted together, as %s. This happens, for instance, if a proxy connects through a unix socket. Then let"
            " your proxies send X-Forwarded-For, and set RATELIMITS['NUM_PROXIES'] to their number or name them in"
            " RATELIMITS['TRUSTED_PROXIES'].",
            remote,
            UNKNOWN_ADDRESS,
        )
    return UNKNOWN_ADDRESS
