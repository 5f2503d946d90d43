"""Find out who makes a request: its account, API key, user and address. Secrets are only used as digests."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any, NamedTuple
from uuid import UUID

from asgiref.sync import sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.db.models import Model
from django.http import HttpRequest

from ratelimits.addresses.proxies import address_of, trusts_no_proxy, unknown
from ratelimits.addresses.reading import LONGEST_ADDRESS, address_key
from ratelimits.conf import conf
from ratelimits.engine.keys import ledger_name


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
        remote = django_request.META.get("REMOTE_ADDR") if trusts_no_proxy() else None
        if remote and len(remote) <= LONGEST_ADDRESS:
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
    return _identity(user_id, api_key, address_key(remote) or unknown(remote))
