"""Find out who makes a request: its user, API key, account and address, each with its name in limits and ledger.

Secrets are only used as digests. The user is `request.user`, and the API key is `request.auth`, if the project has no
hooks USER and API_KEY. The account is the answer of the hook ACCOUNT, or else the user, or else the API key.

Code can also write an identity itself, such as Identity(user="user:42"). `with_account` checks it, and gives it its
account.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeVar

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.apps import apps
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured, SynchronousOnlyOperation
from django.core.signals import setting_changed
from django.db.models import Model
from django.http import HttpRequest
from django.utils.functional import LazyObject, empty

from ratelimits.addresses import LONGEST_ADDRESS, UNKNOWN_ADDRESS, address_key, address_of, trusts_no_proxy, unknown
from ratelimits.background import awaited, is_awaitable
from ratelimits.conf import conf
from ratelimits.engine.keys import ledger_name
from ratelimits.naming import NotAName, name_of, respelled, unwrapped

__all__ = [
    "NO_CLIENT",
    "Identity",
    "NotAName",
    "aidentify",
    "api_key_of",
    "identify",
    "is_account",
    "kinds_in_account",
    "name_of",
    "user_of_account",
    "with_account",
]

# Projects can configure this name, which is older than this module.
logger = logging.getLogger("ratelimits.identity.requests")

_Result = TypeVar("_Result")
#: The address of calls that no client makes.
NO_CLIENT = "outbound"


class Identity(NamedTuple):
    """Who makes a request, as keys such as "user:42". A field is None if the request has no such key."""

    user: str | None = None
    api_key: str | None = None
    account: str | None = None
    address: str | None = None
    #: The names of the keys that the view gives, such as "view_key:5f2c…" (see `view_keys`).
    view_keys: tuple[str, ...] = ()
    #: The fields that the request has but that cannot be read, such as "user". They are None.
    unreadable: tuple[str, ...] = ()

    @property
    def narrowest_key(self) -> str | None:
        """Return the key under which usage is counted: the API key, or else the user."""
        return self.api_key or self.user

    @property
    def account_id(self) -> str:
        """Return the account's identifier without its kind; "" if there is no account."""
        return self.account.removeprefix("account:") if self.account is not None else ""


#: The hooks, in the order in which they are asked.
HOOKS = ("USER", "API_KEY", "ACCOUNT")


#: What a hook may return.
_NAMES = "a row of a model, a text, a whole number, a UUID or None"


#: The default hooks: what they read, and the name of the hook that can replace them.
_SOURCES = {"user": ("request.user", "USER"), "api_key": ("request.auth", "API_KEY")}


@cache
def _has_hooks() -> bool:
    return any(getattr(conf, name) is not None for name in HOOKS)


@cache
def _user_model() -> type[Model] | None:
    """Return the project's user model; None if the project has none."""
    return _model(settings.AUTH_USER_MODEL)


@cache
def _account_model() -> type[Model] | None:
    """Return the model of ACCOUNT_MODEL; for a proxy, the model that has the table, and so all its rows."""
    model = None if conf.ACCOUNT_MODEL is None else _model(conf.ACCOUNT_MODEL)
    return None if model is None else model._meta.concrete_model


@cache
def _users_are_accounts() -> bool:
    """Return whether the account of a user is named as the user is, without "user:"."""
    own, users = _account_model(), _user_model()
    return conf.ACCOUNT is None or (own is not None and users is not None and own is users._meta.concrete_model)


def _model(label: str) -> type[Model] | None:
    try:
        return apps.get_model(label)
    except LookupError:
        return None


def _forget_hooks(*, setting: str, **kwargs: object) -> None:
    if setting in ("RATELIMITS", "AUTH_USER_MODEL"):
        for cached in (_has_hooks, _user_model, _account_model, _users_are_accounts, _identity, _identity_at):
            cached.cache_clear()


setting_changed.connect(_forget_hooks)


async def aidentify(request: HttpRequest) -> Identity:
    """Do the same as `identify`, in async code. Django's user is loaded first, and usually no other query is needed.

    If a hook makes a query, Django refuses it in the event loop. Then the hook runs again, in the thread for the
    synchronous code of this request.
    """
    auser = getattr(request, "auser", None)
    if auser is not None and (not hasattr(request, "user") or _is_djangos(request.user)):
        request.user = await auser()
    if _has_hooks():
        answers = [await _aask(name, request) for name in HOOKS]
        return await _in_thread_if_needed(_identity_by_hooks, request, *answers)
    return await _in_thread_if_needed(identify, request)


def _is_djangos(user: Any) -> bool:
    """Return whether a user is the one that `AuthenticationMiddleware` has set, and is not loaded yet.

    The project has set any other user, such as the lazy user of a JWT: `request.auser` does not know this one.
    """
    if not isinstance(user, LazyObject) or user.__dict__["_wrapped"] is not empty:
        return False
    return getattr(user.__dict__.get("_setupfunc"), "__module__", None) == "django.contrib.auth.middleware"


async def _in_thread_if_needed(function: Callable[..., _Result], *arguments: Any) -> _Result:
    try:
        return function(*arguments)
    except SynchronousOnlyOperation:
        return await sync_to_async(function)(*arguments)


async def _aask(name: str, request: Any) -> Any:
    """Return the answer of a hook; None if the project does not have this hook."""
    hook = getattr(conf, name)
    if hook is None:
        return None
    answer = hook(request) if iscoroutinefunction(hook) else await _in_thread_if_needed(hook, request)
    return await answer if is_awaitable(answer) else answer


def _ask(name: str, request: Any) -> Any:
    """Do the same as `_aask`, in sync code. Raise ImproperlyConfigured if an async hook cannot be awaited here."""
    hook = getattr(conf, name)
    answer = None if hook is None else hook(request)
    return awaited(answer, f"RATELIMITS['{name}']", _view_of(request)) if is_awaitable(answer) else answer


def identify(request: Any) -> Identity:
    """Return the identity of a request of Django or of DRF.

    If `request.user` or `request.auth` cannot be read and the project has no hook for it, the identity says so: see
    `Identity.unreadable`. Raise ImproperlyConfigured if a hook returns something that is no name.
    """
    if _has_hooks():
        return _identity_by_hooks(request, *[_ask(name, request) for name in HOOKS])
    user, auth = getattr(request, "user", None), getattr(request, "auth", None)
    # Use Django's request, since attributes of DRF's request are slow to read.
    django_request = getattr(request, "_request", request)
    try:
        user_id = None if user is None else _user_id(user)
        api_key = None if auth is None else api_key_of(auth)
    except NotAName:
        return _identity_by_hooks(request, None, None, None)
    # The usual case: the user is the account. Identities of this kind are cached.
    remote = django_request.META.get("REMOTE_ADDR") if trusts_no_proxy() else None
    if remote and len(remote) <= LONGEST_ADDRESS:
        return _identity_at(user_id, api_key, remote)
    return _identity(user_id, api_key, address_of(django_request))


def api_key_of(auth: Any) -> str | None:
    """Return the API key for `request.auth`; None if the request has no API key.

    A text can be a secret, and so can the primary key of a row: that of DRF's `Token` is. So their names are digests.
    An anonymous user is no API key. Raise NotAName if `auth` is no name, such as the claims of a JWT.
    """
    try:
        name = name_of(auth, secret=True)
    except NotAName:
        if getattr(auth, "is_authenticated", None) is False:
            return None
        raise
    return None if name is None else f"api_key:{name}"


def _user_id(user: Any) -> int | str | None:
    """Return the name of a user without its kind; None for an anonymous user. Raise NotAName if it cannot be read.

    The name of a row of AUTH_USER_MODEL is its primary key, without the model. Most of these are whole numbers, which
    are returned as they are. An object that is no row, such as the user of a JWT, has the name of its `pk`.
    """
    own, user = _user_model(), unwrapped(user)
    if type(user) is own and getattr(user, "is_authenticated", True) and type(pk := user.pk) is int and pk >= 0:
        return pk  # the usual case
    if isinstance(user, (str, bytes, int)):
        return name_of(user)
    is_row = isinstance(user, Model)
    authenticated = getattr(user, "is_authenticated", is_row or None)
    if authenticated is None:
        return name_of(user)  # A UUID is a name. Any other object cannot be read.
    if not authenticated:
        return None
    if is_row and (own is None or not isinstance(user, own)):
        return name_of(user)
    name = name_of(user, own) if is_row else name_of(getattr(user, "pk", None))
    if name is None:
        raise NotAName(f"a {type(user).__qualname__} without a primary key")
    return name


def _identity_by_hooks(request: Any, user: Any, api_key: Any, account: Any) -> Identity:
    """Return the identity of a request, from the answers of the hooks. An answer of None asks the next source.

    An anonymous user or an empty text says that the request has no user, or no API key.
    """
    unreadable: list[str] = []
    user, api_key, account = unwrapped(user), unwrapped(api_key), unwrapped(account)
    user_id, key = (
        _read(field, request, read, unreadable) if answer is None else _named(field.upper(), answer, request, read)
        for field, answer, read in (("user", user, _user_id), ("api_key", api_key, api_key_of))
    )
    named = _named("ACCOUNT", account, request, _account_id)
    if named is None:
        if user_id is not None:
            named = _account_of_user(user_id)
        elif "user" in unreadable or (key is None and unreadable):
            unreadable.append("account")
        else:
            named = key
    return Identity(
        None if user_id is None else ledger_name(f"user:{user_id}"),
        None if key is None else ledger_name(key),
        None if named is None else f"account:{ledger_name(named)}",
        address_of(getattr(request, "_request", request)),
        unreadable=tuple(unreadable),
    )


def kinds_in_account(identity: Identity) -> tuple[str, ...]:
    """Return the beginnings of those keys of an identity whose limits are in the shard of its account.

    These are keys that have no other account. A key with several accounts would have several counters there.
    """
    if identity.account is None:
        return ()
    if conf.ONE_ACCOUNT_PER_KEY:
        return ("user:", "api_key:")
    return ("user:",) if identity.user is not None and is_account(identity.user, identity) else ()


def is_account(key: str, identity: Identity) -> bool:
    """Return whether a user or API key of an identity is its account: then all usage of the account is of this key."""
    account = identity.account_id
    return key == account or (conf.ACCOUNT is None and key == f"user:{account}")


def _account_id(value: Any) -> str | None:
    """Return the name of an account that the hook ACCOUNT returned.

    Rows of ACCOUNT_MODEL are named without their model. A user is named as if the hook had returned None. Raise
    NotAName if the value is no name.
    """
    own, users = _account_model(), _user_model()
    is_own = own is not None and isinstance(value, own)
    is_user = users is not None and isinstance(value, users)
    if (is_user and (not is_own or _users_are_accounts())) or (not is_own and getattr(value, "is_anonymous", False)):
        user_id = _user_id(value)
        return None if user_id is None else _account_of_user(user_id)
    return name_of(value, own)


def user_of_account(account: str) -> str | None:
    """Return the user who is the account with this identifier; None if the account is no user, or perhaps none."""
    if account.startswith("user:"):
        return account
    return None if not account or conf.ACCOUNT is not None or account.startswith("api_key:") else f"user:{account}"


def _account_of_user(user_id: int | str) -> str:
    """Return the name of the account of a user who pays for the own requests."""
    name = ledger_name(f"user:{user_id}")
    return name.removeprefix("user:") if _users_are_accounts() else name


def _named(hook: str, answer: Any, request: Any, read: Callable[[Any], Any]) -> Any:
    """Return the name that a hook returned. Raise ImproperlyConfigured if its answer is no name."""
    if answer is None:
        return None
    try:
        return read(answer)
    except NotAName as error:
        raise ImproperlyConfigured(
            f"RATELIMITS['{hook}'] returned {error} for {_view_of(request)}. It must return {_NAMES}."
        ) from error


def _read(field: str, request: Any, read: Callable[[Any], Any], unreadable: list[str]) -> Any:
    """Return the name that the request itself has. If it cannot be read, add the field to `unreadable`."""
    source, hook = _SOURCES[field]
    try:
        return read(getattr(request, source.removeprefix("request."), None))
    except NotAName as error:
        unreadable.append(field)
        _log_once(f"{source} is {error} in {_view_of(request)}, so it cannot be read as {field}.", hook)
        return None


def _view_of(request: Any) -> str:
    """Return the view of a request for a message; its path if the view is not known yet."""
    match = getattr(request, "resolver_match", None)
    return str(getattr(match, "_func_path", None) or getattr(request, "path", "a request"))


@lru_cache(maxsize=100)
def _log_once(what: str, hook: str) -> None:
    logger.error(
        "%s The failure policies of the rules that need it decide. Set RATELIMITS['%s'] to a function of the request"
        " that returns %s.",
        what,
        hook,
        _NAMES,
    )


# Most primary keys are whole numbers. Then the key, such as "user:42", is also its ledger name.
@lru_cache(maxsize=8192)
def _identity(user_id: int | str | None, api_key: str | None, address: str) -> Identity:
    """Return the identity of a user, who is the account. Without a user, the API key is the account."""
    key = None if api_key is None else ledger_name(api_key)
    if user_id is None:
        return Identity(None, key, None if api_key is None else f"account:{ledger_name(api_key)}", address)
    user = ledger_name(f"user:{user_id}")
    return Identity(user, key, f"account:{user.removeprefix('user:')}", address)


@lru_cache(maxsize=8192)
def _identity_at(user_id: int | str | None, api_key: str | None, remote: str) -> Identity:
    """Do the same as `_identity`. `remote` is a REMOTE_ADDR that is the client's address."""
    return _identity(user_id, api_key, address_key(remote) or unknown(remote))


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
