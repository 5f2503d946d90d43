"""Find the address of the client of a request. Proxies of the project can be between the client and the app."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache, lru_cache
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.http import HttpRequest

from ratelimits.addresses.reading import LONGEST_ADDRESS, UNKNOWN_ADDRESS, address_key, ipv4_network_in, read_address
from ratelimits.conf import conf, shown
from ratelimits.conf.setting_rules import UNIX, complaint

logger = logging.getLogger(__name__)

#: Maximum number of entries that are read from the end of a header, if no setting says how many proxies there are.
_MAX_PROXIES = 32
_warned = False


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
