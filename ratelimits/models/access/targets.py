"""Targets of blocks and allows: a key such as "user:42", or a network such as "ip:203.0.113.0/24"."""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from django.core.exceptions import ValidationError
from django.utils.translation import gettext_lazy as _

from ratelimits.addresses import UNKNOWN_ADDRESS
from ratelimits.models.keys import canonical_key, ipv4_counted, validate_key

#: IPv6 addresses are counted by their /64 network, so a smaller network cannot be a target.
NARROWEST_V6 = 64


def canonical(text: str) -> str:
    """Return the stored form of a typed target. An address or a network may be typed without "ip:".

    Raise ValidationError if the text is neither a key nor a network, or is a network that cannot be a target.
    """
    text = text.strip()
    kind, _colon, name = text.partition(":")
    if kind != "ip" or not name:
        try:
            return _network_target(text)
        except ValueError:
            validate_key(text)
            return canonical_key(text)
    if text == UNKNOWN_ADDRESS:  # the key of all requests whose address cannot be read
        return text
    try:
        return _network_target(name)
    except ValueError as error:
        raise ValidationError(
            _("%(name)s is not an address or network: write one such as 203.0.113.9, 203.0.113.0/24 or 2001:db8::/32."),
            code="target",
            params={"name": name},
        ) from error


def validate_target(text: str) -> None:
    """Raise ValidationError if the text cannot be the target of a block or allow (see `canonical`)."""
    canonical(text)


def address_count(target: str) -> int | None:
    """Return the number of addresses in a target, or None for a key that is not an address.

    For IPv6, return the number of /64 networks instead.
    """
    if not target.startswith("ip:") or target == UNKNOWN_ADDRESS:
        return None
    network = ip_network(target.removeprefix("ip:"))
    return int(network.num_addresses) if network.version == 4 else 1 << (NARROWEST_V6 - network.prefixlen)


def _network_target(name: str) -> str:
    """Return the target for an address or a network. Raise ValueError if the text is neither.

    For an IPv6 network whose addresses contain IPv4 addresses, return the IPv4 network.

    Raise ValidationError for an IPv6 address or an IPv6 network smaller than /64. Raise it also for a network that is
    written with another address than its first.
    """
    network = typed = ip_network(name, strict=False)
    if isinstance(typed, IPv6Network):
        network = ipv4_counted(typed) or typed
    if isinstance(network, IPv6Network) and network.prefixlen > NARROWEST_V6:
        raise ValidationError(
            _(
                "IPv6 addresses are counted by their /64 network, since one subscriber has the whole network:"
                " write ip:%(wanted)s."
            ),
            code="target",
            params={"wanted": network.supernet(new_prefix=NARROWEST_V6)},
        )
    if "/" in name and typed.network_address != ip_address(name.partition("/")[0]):
        raise ValidationError(
            _("The address in %(name)s is not the first address of this network: write %(network)s for the network."),
            code="target",
            params={"name": name, "network": network},
        )
    is_one_address = isinstance(network, IPv4Network) and network.prefixlen == 32
    return f"ip:{network.network_address if is_one_address else network}"
