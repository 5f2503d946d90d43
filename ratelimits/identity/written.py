"""Check the identities that code writes itself, such as Identity(user="user:42"), and give them their account."""

from __future__ import annotations

from functools import lru_cache

from django.core.exceptions import ImproperlyConfigured

from ratelimits.addresses.reading import UNKNOWN_ADDRESS, address_key
from ratelimits.conf import conf
from ratelimits.engine.keys import ledger_name
from ratelimits.identity.requests import Identity
from ratelimits.naming import respelled

#: The address of calls that no client makes.
NO_CLIENT = "outbound"


def with_account(identity: Identity) -> Identity:
    """Return an identity that was not read from a request, with the account that requests of its key have.

    Raise ImproperlyConfigured if the identity must name its account itself, or if no request has one of its names.
    """
    for kind in ("user", "api_key", "account"):
        key = getattr(identity, kind)
        if key is not None:
            _check_spelling(kind, key)
    if identity.address is not None:
        _check_address(identity.address)
    for key in identity.view_keys:
        if not key.startswith("view_key:"):
            raise ImproperlyConfigured(
                f"{key!r} is not the key of a view: write view_keys=('header:X-Tenant=acme',), with a comma at the end."
            )
    key = identity.user or identity.api_key
    if key is None or (identity.account is not None and conf.ACCOUNT is not None):
        return identity
    if conf.ACCOUNT is None:
        account = f"account:{key.removeprefix('user:')}"
        if identity.account not in (None, account):
            raise ImproperlyConfigured(
                f"The identity {key} has the account {identity.account!r}, but without RATELIMITS['ACCOUNT'] all"
                f" requests of {key} have the account {account!r}: leave the account out."
            )
        return identity._replace(account=account)
    if conf.ONE_ACCOUNT_PER_KEY:
        raise ImproperlyConfigured(
            f"The identity {key} has no account. With RATELIMITS['ONE_ACCOUNT_PER_KEY'], its limits are in the shard of"
            " its account: write Identity(…, account='account:…')."
        )
    return identity


@lru_cache(maxsize=8192)
def _check_spelling(kind: str, key: str) -> None:
    """Raise ImproperlyConfigured if no request can have a key."""
    name = key.removeprefix(f"{kind}:")
    right = respelled(name, of_account=kind == "account")
    wanted = f"{kind}:{ledger_name(right)}" if kind == "account" else ledger_name(f"{kind}:{right}")
    if key != wanted:
        raise ImproperlyConfigured(
            f"No request has the key {key!r}, since its text needs another spelling: write {wanted!r}. The function"
            " ratelimits.identity.name_of returns the name of any user, API key or account."
        )


@lru_cache(maxsize=8192)
def _check_address(key: str) -> None:
    """Raise ImproperlyConfigured if no request is counted under a key of an address."""
    text = key.removeprefix("ip:").removesuffix("/64")
    wanted = address_key(text)
    if key not in (wanted, UNKNOWN_ADDRESS, NO_CLIENT):
        raise ImproperlyConfigured(f"No request has the address {key!r}: write {wanted or 'ip:203.0.113.9'!r}.")
