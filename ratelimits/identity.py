"""Find out who makes a request: its account, API key, user and address. Secrets are only used as digests."""

from __future__ import annotations

import hashlib
import ipaddress
import logging
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any, NamedTuple
from uuid import UUID

from asgiref.sync import sync_to_async
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured, SynchronousOnlyOperation
from django.core.signals import setting_changed
from django.db.models import Model
from django.http import HttpRequest

from ratelimits.conf import conf, shown
from ratelimits.conf.setting_rules import UNIX, complaint
from ratelimits.engine.keys import ledger_name
from ratelimits.models.keys import UNKNOWN_ADDRESS

logger = logging.getLogger(__name__)

#: Maximum characters of a text that can be an address. The longest is an IPv6 address with a zone and a port.
_MAX_LENGTH = 100
#: Maximum number of entries that are read from the end of a header, if no setting says how many proxies there are.
_MAX_PROXIES = 32
_warned = False


class Identity(NamedTuple):
    """Who makes a request, as keys such as "user:42". A field is None if the request has no such key."""

    user: str | None = None
    api_key: str | None = None
    account: str | None = None
    address: str | None = None
    #: The key that the view gives (see `view_keys`).
    view_key: str | None = None

    @property
    def narrowest_key(self) -> str | None:
        """Return the key under which usage is counted: the API key, or else the user."""
        return self.api_key or self.user

    @property
    def account_id(self) -> str:
        """Return the account's identifier without its kind; "" if there is no account."""
        return self.account.removeprefix("account:") if self.account is not None else ""


def _digest(secret: str | bytes) -> str:
    data = secret.encode(errors="surrogatepass") if isinstance(secret, str) else secret
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def api_key_of(auth: Any) -> str | None:
    """Return the API key for `request.auth`; None if the request has no API key.

    A key has the id or UUID of a row, or the digest of a text. A text can be a secret: the primary key of DRF's `Token`
    is its secret. A mapping, such as the claims of a JWT, is not an API key.
    """
    if auth is None:
        return None
    value = auth.pk if isinstance(auth, Model) else auth
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, UUID)):
        return f"api_key:{value}"
    if isinstance(value, (str, bytes)) and value:
        return f"api_key:{_digest(value)}"
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
def _trusts_no_proxy() -> bool:
    """Return whether no proxy is trusted, so that REMOTE_ADDR is the client's address. The result is cached."""
    return not conf.TRUSTED_PROXIES and not proxies()


def _forget_proxies(*, setting: str, **kwargs: object) -> None:
    if setting in ("RATELIMITS", "REST_FRAMEWORK"):
        proxies.cache_clear()
        _trusts_no_proxy.cache_clear()


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
    return address or _unknown(remote)


def _from_trusted_proxy(meta: Mapping[str, Any], remote: str, trusted_proxies: tuple[str, ...]) -> str | None:
    """Return the client's address in ADDRESS_HEADER.

    Return None if the header has no address, or if the request does not come from a trusted proxy.

    Each proxy adds the address of its client at the end. So the last entry that is not a trusted proxy is the client.
    """
    header = meta.get(f"HTTP_{conf.ADDRESS_HEADER.upper().replace('-', '_')}")
    if not header or not _is_trusted(remote[:_MAX_LENGTH], trusted_proxies):
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
    address = _address(text)
    if address is None:
        return UNIX in trusted_proxies
    networks = (ipaddress.ip_network(proxy, strict=False) for proxy in trusted_proxies if proxy != UNIX)
    return any(address in network for network in networks)


def _unknown(remote: str | None) -> str:
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


#: The bits of an IPv6 address that name its /64 network.
_NETWORK_BITS = ~((1 << 64) - 1)


def address_key(text: str) -> str | None:
    """Return the key of the address in a text. The text can also have a port.

    Return None for any other text, such as the path of a unix socket.
    """
    # A longer text is not an address. Clients write this text, so do not fill the cache with long texts.
    return _address_key(text) if len(text) <= _MAX_LENGTH else None


@lru_cache(maxsize=8192)
def _address_key(text: str) -> str | None:
    address = _address(text)
    if isinstance(address, ipaddress.IPv6Address):
        return f"ip:{ipaddress.IPv6Address(int(address) & _NETWORK_BITS)}/64"
    return None if address is None else f"ip:{address}"


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
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


async def aidentify(request: HttpRequest) -> Identity:
    """Do the same as `identify`, in async code. The user is loaded first, and usually no other query is needed.

    If RATELIMITS["ACCOUNT"] makes a query, Django refuses it in the event loop. Then `identify` runs again, in the
    thread for the synchronous code of this request.
    """
    auser = getattr(request, "auser", None)
    if auser is not None:
        request.user = await auser()
    try:
        return identify(request)
    except SynchronousOnlyOperation:
        return await sync_to_async(identify)(request)


def identify(request: Any) -> Identity:
    """Return the identity of a request of Django or of DRF."""
    user = getattr(request, "user", None)
    user_id = user.pk if user is not None and user.is_authenticated else None
    auth = getattr(request, "auth", None)
    api_key = api_key_of(auth) if auth is not None else None
    # Use Django's request, since attributes of DRF's request are slow to read.
    django_request = getattr(request, "_request", request)
    # The usual case: the user is the account. Identities of this kind are cached.
    if conf.ACCOUNT is None and (user_id is None or (type(user_id) is int and 0 <= user_id < 2**63)):
        remote = django_request.META.get("REMOTE_ADDR") if _trusts_no_proxy() else None
        if remote and len(remote) <= _MAX_LENGTH:
            return _identity_at(user_id, api_key, remote)
        return _identity(user_id, api_key, address_of(django_request))
    address = address_of(django_request)
    user_name = ledger_name(f"user:{user_id}") if user_id is not None else None
    account = user_id
    if conf.ACCOUNT is not None:
        account = conf.ACCOUNT(request)
        # If the account is a row, use its primary key, since the text of a row can change. For an `AnonymousUser` this
        # gives None: the request has no account.
        account = getattr(account, "pk", account)
    account_name = f"account:{ledger_name(str(account))}" if account not in (None, "") else None
    return Identity(user_name, api_key, account_name, address)


# Most primary keys are whole numbers. Then the key, such as "user:42", is also its ledger name.
@lru_cache(maxsize=8192)
def _identity(user_id: int | None, api_key: str | None, address: str) -> Identity:
    """Return the identity of a user whose primary key is a number from 0 to 2**63 - 1, and who is the account."""
    if user_id is None:
        return Identity(None, api_key, None, address)
    return Identity(f"user:{user_id}", api_key, f"account:{user_id}", address)


@lru_cache(maxsize=8192)
def _identity_at(user_id: int | None, api_key: str | None, remote: str) -> Identity:
    """Do the same as `_identity`. `remote` is a REMOTE_ADDR that is the client's address."""
    return _identity(user_id, api_key, address_key(remote) or _unknown(remote))
