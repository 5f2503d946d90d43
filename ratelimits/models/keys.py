"""Key strings such as "api_key:4": their kinds, their spelling, and the shard of the configuration for each key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Any
from zlib import crc32

from django.core.exceptions import ValidationError
from django.core.validators import MaxLengthValidator
from django.db import models
from django.utils.translation import gettext_lazy as _

from ratelimits.addresses import UNKNOWN_ADDRESS, ipv4_network_in
from ratelimits.engine.keys import LONGEST_KEY, LONGEST_NAME, ledger_name
from ratelimits.models.fields import view_key_texts
from ratelimits.models.fields.rule_fields import IPV6_PREFIX
from ratelimits.models.versions import KEY_SHARDS
from ratelimits.naming import NEXT_KEY, NUMBERS, is_shown, respelled, without_secret


class KeyKind(models.TextChoices):
    """The kind of key that a rule counts."""

    CALLER = "caller", _("caller (user, else API key, else address)")
    USER = "user", _("user")
    API_KEY = "api_key", _("API key")
    ACCOUNT = "account", _("account")
    IP = "ip", _("address")
    GLOBAL = "global", _("everyone together")
    VIEW_KEY = "view_key", _("key that the view gives")


#: By kind of key: the kind itself, and the kinds of keys that belong to a key of this kind. For example, the API keys
#: of a user belong to the user.
COVERS: dict[str, frozenset[str]] = {
    "api_key": frozenset({"api_key"}),
    "user": frozenset({"user", "api_key"}),
    "account": frozenset({"account", "user", "api_key"}),
    "ip": frozenset({"ip"}),
    # A key that the view gives is written with its source, such as "header:X-Tenant=acme".
    **{source: frozenset({"view_key"}) for source in view_key_texts.SOURCES},
}
#: By the `key_kind` of a rule: the kinds of keys that the rule can count.
COUNTED: dict[str, frozenset[str]] = {
    **{kind: frozenset({kind}) for kind in ("user", "api_key", "account", "ip", "global", "view_key")},
    "caller": frozenset({"api_key", "user", "ip"}),
}


def network_key(address: str, ipv4_prefix: int, ipv6_prefix: int) -> str:
    """Return the key of the network that contains an address: "ip:203.0.113.0/24" for "ip:203.0.113.9".

    `address` is the key of an IPv4 address, or of an IPv6 network with the prefix length 64. If `address` cannot be
    read, return it unchanged.
    """
    host, _slash, _length = address[3:].partition("/")  # without "ip:" at the start
    try:
        prefix = ipv6_prefix if ":" in host else ipv4_prefix
        network = ip_network((host, prefix), strict=False)
    except ValueError:  # requests whose address cannot be read share the key UNKNOWN_ADDRESS
        return address
    is_one_address = network.prefixlen == network.max_prefixlen
    return f"ip:{network.network_address}" if is_one_address else f"ip:{network}"


def address_in(key: str) -> str:
    """Return the key of the first address in a network such as "ip:203.0.113.0/24". Return other keys unchanged.

    For IPv6, return the key of the first /64 network instead.
    """
    kind, _colon, name = key.partition(":")
    host, slash, _length = name.partition("/")
    if kind != "ip" or not slash:
        return key
    try:
        ip_network(name)
    except ValueError:  # `validate_key` reports this text
        return key
    return f"ip:{host}" if ip_address(host).version == 4 else f"ip:{host}/{IPV6_PREFIX}"


def key_shard(key: str) -> int:
    """Return the shard of the configuration that has the rows about a key.

    Overrides, memberships and accounts are divided by key into KEY_SHARDS shards. These are not the shards of usage.
    """
    return crc32(key_name(key).encode()) % KEY_SHARDS


def key_name(key: str) -> str:
    """Return the name of a key in memory and in Redis.

    This is the key itself. But for a key that a view gives, such as "header:X-Tenant=acme", it is a name that does not
    contain the value. All texts that mean the same key have one name.
    """
    if not view_key_texts.is_text(key):
        return key
    try:
        return view_key_texts.name_of(*view_key_texts.read(key))
    except ValueError:  # `validate_key` reports this text
        return key


def canonical_key(key: str) -> str:
    """Return the one text that is stored for a key: the key that requests have.

    Other texts can mean the same key, such as "header:x-tenant= acme", or "user:~ada" for "user:=~ada". Return a text
    that is not valid unchanged: `validate_key` reports it.
    """
    if not view_key_texts.is_text(key):
        return key if len(_keys_in(key)) > 1 else spelled_key(key)
    try:
        source, value = view_key_texts.read(key)
    except ValueError:
        return key
    return f"{source.text}={value}"


def spelled_key(key: str) -> str:
    """Return the key that requests of a user, API key or account have. Its name can be any text, but one key alone."""
    kind, _colon, name = key.partition(":")
    if kind == "account":
        return f"account:{canonical_account(name)}"
    return ledger_name(f"{kind}:{respelled(name)}") if kind in NAMED and name else key


def _keys_in(text: str) -> list[str]:
    """Return the keys that people seem to have written into one text."""
    kind, _colon, name = text.partition(":")
    if NUMBERS.fullmatch(name):
        return [f"{kind}:{number}" for number in re.findall(r"\d+", name)]
    return [stripped for part in NEXT_KEY.split(text) if (stripped := part.strip(" \t\r\n,;|/"))]


def canonical_account(name: str) -> str:
    """Return the name that requests of an account have, for a typed name or another text of the project."""
    return ledger_name(respelled(name, of_account=True))


def derived_key(values: Mapping[str, Any], name: str = "key", prefix: str = "") -> dict[str, Any]:
    """Return the shard and the canonical text of the new key in `values[name]`, or {} if there is no new key.

    `prefix` is put before the value, such as "account:" before an identifier. Raise TypeError if the value is not a
    text but an expression of Django, such as F("name").
    """
    if name not in values:
        return {}
    if not isinstance(values[name], str):
        raise TypeError(f"{name} can only be set to a text, not to an expression: save the rows one by one")
    key = prefix + values[name]
    # This text comes from code, such as f"user:{pk}". So it has one key, and people did not write several into it.
    key = canonical_key(key) if view_key_texts.is_text(key) else spelled_key(key)
    return {"shard": key_shard(key), name: key.removeprefix(prefix)}


#: The kinds of keys with a name that a project chose.
NAMED = ("user", "api_key", "account")


def validate_key(key: str) -> None:
    """Raise ValidationError if the text is not exactly one key. Refuse also "global"."""
    if view_key_texts.is_text(key):
        _validate_view_key(key)
        return
    kind, _colon, name = key.partition(":")
    keys = _keys_in(key)
    if len(keys) > 1:
        text = _("These are %(count)d keys: write only %(first)s here, and add a row for each of the others.")
        one = _("If it is the name of one key, write %(one)s.") if kind in NAMED else ""
        raise ValidationError(
            f"{text} {one}".rstrip(),
            code="key",
            params={"count": len(keys), "first": keys[0], "one": spelled_key(key)},
        )
    # People who type "user: 42" mean user:42.
    if kind not in COVERS or not name or name != name.strip() or (kind == "ip" and re.search(r"\s", name)):
        raise ValidationError(
            _("%(key)s is not a key: write a kind, a colon and an id, such as user:42, %(others)s."),
            code="key",
            params={"key": key, "others": "api_key:4, account:7, ip:203.0.113.9"},
        )
    # An account is counted under its name without its kind, and any other key under the whole key. A longer name is
    # counted under its digest, so a row for the name itself would never apply.
    longest = LONGEST_NAME if kind == "account" else LONGEST_NAME - len(f"{kind}:")
    if len(name) > longest:
        raise ValidationError(
            _("The key is too long: write at most %(longest)d characters after %(kind)s."),
            code="key",
            params={"longest": longest, "kind": f"{kind}:"},
        )
    if kind == "ip" and key != UNKNOWN_ADDRESS:
        _validate_address(name)
    _validate_spelling(key, canonical_key(key))


def refuse_secret(key: str, field: str = "key") -> None:
    """Raise ValidationError, about this field, if a key has the text of an API key: it would be stored and shown."""
    kind, _colon, name = key.partition(":")
    if kind == "api_key" and (wanted := without_secret(name)) != name:
        text = _("Requests have only the digest of an API key that is a text: write %(wanted)s.")
        raise ValidationError({field: ValidationError(text, code="secret", params={"wanted": f"api_key:{wanted}"})})


def validate_account(name: str) -> None:
    """Raise ValidationError if requests of an account do not have this name."""
    _validate_spelling(name, canonical_account(name))


def _validate_spelling(typed: str, wanted: str) -> None:
    if typed != wanted:
        raise ValidationError(
            _("No request has the name %(typed)s, since this text needs another spelling: write %(wanted)s."),
            code="key",
            params={"typed": typed, "wanted": wanted},
        )


def validate_counted_key(key: str) -> None:
    """Do the same as `validate_key`, but also accept a network, because some rules count addresses by network."""
    kind, _colon, name = key.partition(":")
    if kind == "ip" and "/" in name:
        with suppress(ValueError):  # `validate_key` reports a text that is not a network
            network = ip_network(name)
            inner = ipv4_counted(network) if isinstance(network, IPv6Network) else None
            if inner is not None:
                raise _counted_as(name, inner)
    validate_key(address_in(key))


def ipv4_counted(network: IPv6Network) -> IPv4Network | None:
    """Return the IPv4 network as which an IPv6 network is counted (see `ipv4_network_in`).

    Raise ValidationError if its addresses are counted as IPv4 addresses, but as those of no network.
    """
    try:
        return ipv4_network_in(network)
    except ValueError as error:
        raise ValidationError(
            _(
                "The addresses in %(name)s are counted as IPv4 addresses, since each of them contains one: write an"
                " IPv4 address or network, such as 203.0.113.9."
            ),
            code="key",
            params={"name": network},
        ) from error


def _counted_as(name: str, inner: IPv4Network) -> ValidationError:
    """Return the error for an IPv6 address or network that is counted as an IPv4 address or network."""
    return ValidationError(
        _("Write ip:%(wanted)s: %(name)s is counted as the IPv4 address in it."),
        code="key",
        params={"name": name, "wanted": inner.network_address if inner.prefixlen == 32 else inner},
    )


def _validate_view_key(key: str) -> None:
    """Raise ValidationError if the text is not a source and a value, or if a form cannot show it."""
    try:
        view_key_texts.read(key)
    except ValueError as error:
        raise ValidationError(
            _(
                "%(key)s is not a key: write where the view finds the value, an equals sign and the value, such as"
                " header:X-Tenant=acme, query:team=7, field:email|lower=a@example.com, arg:pk=7 or"
                " call:shop.keys.tenant=acme."
            ),
            code="key",
            params={"key": key},
        ) from error
    if not is_shown(canonical_key(key)):
        raise ValidationError(_("A key has only characters that can be shown."), code="key")
    MaxLengthValidator(LONGEST_KEY)(canonical_key(key))  # it can be longer than the typed text


def validate_source(text: str) -> None:
    """Raise ValidationError if the text does not say where a view finds the value of a key."""
    try:
        view_key_texts.source_of(text)
    except ValueError as error:
        raise ValidationError(
            _(
                "%(text)s is not the key of a view: write a text such as header:X-Tenant, query:team, field:email,"
                " field:email|lower, arg:pk or call:shop.keys.tenant."
            ),
            code="view_key",
            params={"text": text},
        ) from error


def _validate_address(name: str) -> None:
    """Raise ValidationError if the text is neither a whole IPv4 address nor a /64 network of IPv6."""
    try:
        network = ip_network(name, strict=False)
    except ValueError as error:
        raise ValidationError(
            _("%(name)s is not an address: write one such as 203.0.113.9 or 2001:db8::/64."),
            code="key",
            params={"name": name},
        ) from error
    wanted = str(network.network_address)
    if isinstance(network, IPv6Network):
        inner = ipv4_counted(network)
        if inner is not None:
            raise _counted_as(name, IPv4Network(inner.network_address))
        wanted = str(ip_network((network.network_address, IPV6_PREFIX), strict=False))
    if name != wanted:
        raise ValidationError(
            _(
                "Write ip:%(wanted)s: each IPv4 address is counted alone, and IPv6 addresses are counted by their"
                " /64 network."
            ),
            code="key",
            params={"wanted": wanted},
        )
