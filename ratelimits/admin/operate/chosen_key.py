"""Find the key for which a user wants to do something. If several keys match the typed text, ask for the right key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlencode

from django import forms
from django.contrib.admin import AdminSite
from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.db import models
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ratelimits.admin.inspected import inspect_url, may_inspect
from ratelimits.admin.operate.confirming import may_operate
from ratelimits.admin.suggestions import suggest_keys
from ratelimits.conf import conf
from ratelimits.identity import Identity
from ratelimits.models import Access, Account, KeyOverride, PlanMembership
from ratelimits.models.accounts.named import accounts_now
from ratelimits.models.fields import view_key_texts
from ratelimits.models.keys import COVERS
from ratelimits.naming import is_shown
from ratelimits.routers import is_own
from ratelimits.status.additions import used_keys
from ratelimits.status.keys import (
    MAX_KEYS,
    KnownKey,
    closeness,
    keys_of_account,
    known_keys,
    looks_secret,
    no_owner_text,
    searched_name,
    typed_key,
)
from ratelimits.status.operating import NO_ACCOUNT, NothingDoneError, UnknownAccountError, identity_of

#: Maximum number of characters of a searched text. No key is longer.
MAX_TEXT = 300


class KeyForm(forms.Form):
    """A form that asks for a key, and for its account if the account is not clear."""

    required_css_class = "required"
    key = forms.CharField(
        label=gettext_lazy("For whom"),
        max_length=MAX_TEXT,
        help_text=gettext_lazy(
            "A name of a customer, user or API key; a part of such a name; or a whole key, such as user:42."
        ),
    )
    account = forms.CharField(
        label=gettext_lazy("Account"),
        max_length=MAX_TEXT,
        required=False,
        help_text=gettext_lazy(
            "Only for a user or API key with several accounts or an unknown account. If the key has no account, write a"
            " hyphen (-)."
        ),
    )


@dataclass(frozen=True, slots=True)
class ChosenKey:
    """The key for which a user wants to do something.

    account  the value of the field "account" in the next form; "" if the key itself is an account, an address or a key
             that a view gives
    names    the names of this account, user or API key, such as a user name
    """

    key: str
    identity: Identity
    account: str = ""
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.key} ({', '.join(self.names)})" if self.names else self.key

    def inspect_url(self, site: AdminSite) -> str:
        """Return the URL of the inspector's page about the key."""
        return inspect_url(self.key, self.account, site.name)


class KeyQuestion(NamedTuple):
    """A question about the key, and the reason why the page asks.

    problem  a sentence that says why the page asks, and what to do; "" if nothing was typed yet
    choices  the keys or accounts to choose from. Each has the URL that opens the requested page with this choice
    """

    problem: str = ""
    choices: tuple[tuple[KnownKey, str], ...] = ()


def chosen_key(request: HttpRequest, site: AdminSite) -> ChosenKey | KeyQuestion:
    """Return the key that the values `key` and `account` of the request mean. If it is not clear, return a question.

    The value `key` is a key, an address, or a part of a key or of a name. Also return a question if nobody has the key.
    """
    values = request.POST if request.method == "POST" else request.GET
    text, account = (values.get(name, "").strip() for name in ("key", "account"))
    if not text:
        return KeyQuestion()
    if max(len(text), len(account)) > MAX_TEXT or not is_shown(text + account):
        return KeyQuestion(
            _(
                "This text is too long for a key, or has characters that no key has. Type the key, a part of the key,"
                " or a part of its name."
            )
        )
    # If a text begins like a key but is not a key, `identity_of` says so. (The names in COVERS are all kinds of keys.)
    key = typed_key(text) or (text if text.partition(":")[0] in COVERS else None)
    if key is None:
        found = known_keys(text, searched_tables(request, site))
        keys = sorted(_with_accounts(found.keys), key=lambda known_key: closeness(known_key, text))
        if len(keys) != 1:
            return _which_one(request, text, keys, has_more=found.has_more)
        key = keys[0].key
    account_key = f"account:{account}" if account not in ("", NO_ACCOUNT) else ""
    problem = no_owner_text(key) or (account_key and no_owner_text(account_key))
    if problem:
        return KeyQuestion(problem)
    try:
        identity = identity_of(key, account)
    except UnknownAccountError as error:
        return _which_account(request, key, error)
    except (NothingDoneError, ValidationError) as error:
        return KeyQuestion(" ".join(error.messages) if isinstance(error, ValidationError) else str(error))
    has_no_account = key.startswith(("account:", "ip:")) or view_key_texts.is_text(key)
    account_value = "" if has_no_account else identity.account_id or NO_ACCOUNT
    return ChosenKey(key, identity, account_value, tuple(names_of(request, site, key)))


def ask_for_key(
    request: HttpRequest, site: AdminSite, opts: Any, question: KeyQuestion, title: str, back: str
) -> HttpResponse:
    """Return the page that asks for the key. Its form sends the key to the URL of this request, as `?key=`."""
    values = request.POST if request.method == "POST" else request.GET
    form = KeyForm(initial={name: values.get(name, "") for name in ("key", "account")})
    form.fields["key"].widget.attrs["autofocus"] = True
    if may_inspect(request):
        suggest_keys(form.fields["key"], site.name, "keys")
        suggest_keys(form.fields["account"], site.name, "accounts")
    context = {
        **site.each_context(request),
        "title": title,
        "question": question,
        # The choices need an explanation only if one of them is a user.
        "explained": any(one.key.startswith("user:") for one, _url in question.choices),
        "form": form,
        "other_values": [(name, value) for name, value in request.GET.items() if name not in form.fields],
        "media": form.media,
        "opts": opts,
        "back": back,
    }
    return TemplateResponse(request, "ratelimits/admin/operate_key.html", context)


def _which_one(request: HttpRequest, text: str, keys: list[KnownKey], *, has_more: bool) -> KeyQuestion:
    if not keys and looks_secret(text):
        return KeyQuestion(_("This looks like a secret. Search for the name of the key instead."))
    if not keys:
        problem = _(
            "No key or name that you may view contains “%(text)s”. Write a shorter text, or the whole key, such as"
            " user:42."
        )
        return KeyQuestion(problem % {"text": text})
    problem = _("Which key do you mean?")
    if has_more:
        problem += " " + _("There are more keys: at most %s are listed. Write more of the key or name.") % MAX_KEYS
    return KeyQuestion(problem, tuple((known, _url(request, known.key)) for known in keys))


def _with_accounts(keys: list[KnownKey]) -> Iterator[KnownKey]:
    """Yield the keys. Without RATELIMITS["ACCOUNT"], each user is an account too: yield this account before the user.

    The account comes first because a request with an API key is counted for the account, and not for the user.
    """
    found = {known.key for known in keys}
    for known in keys:
        kind, _colon, name = known.key.partition(":")
        if conf.ACCOUNT is None and kind == "user" and f"account:{name}" not in found:
            yield KnownKey(f"account:{name}", known.name)
        yield known


def _which_account(request: HttpRequest, key: str, error: UnknownAccountError) -> KeyQuestion:
    accounts = [KnownKey(account) for account in error.accounts]
    none = KnownKey(NO_ACCOUNT, _("The key has no account"))
    return KeyQuestion(str(error), tuple((one, _url(request, key, one.key)) for one in (*accounts, none)))


def keys_of(request: HttpRequest, site: AdminSite, found: ChosenKey) -> tuple[tuple[KnownKey, str], ...]:
    """Return the keys that an account used lately. Each has the URL of the requested page for this key.

    Return no keys if `found` is not an account, or if the user may not view used keys.
    """
    if found.key != found.identity.account or not any(may_view(request, site, used.shown_with) for used in used_keys()):
        return ()
    keys, account = keys_of_account(found.identity.account_id)[:MAX_KEYS], found.identity.account_id
    return tuple((KnownKey(key), _url(request, key, account)) for key in keys if typed_key(key) is not None)


def _url(request: HttpRequest, key: str, account: str = "") -> str:
    """Return the query string with which the requested page is about a key. Other values in its URL stay."""
    other_values = {name: value for name, value in request.GET.items() if name not in ("key", "account")}
    query = {"key": key} | ({"account": account} if account else {}) | other_values
    return f"?{urlencode(query)}"


def names_of(request: HttpRequest, site: AdminSite, key: str) -> Iterator[str]:
    """Yield the names of a key: the name of the API key, the account or the user.

    Leave out the name of an account or a user if the user of the page may not view this account or user.
    """
    kind, _colon, identifier = key.partition(":")
    users: Any = get_user_model()
    names: list[str] = []
    if kind == "account" and may_view(request, site, Account):
        names += [row.name for row in accounts_now(conf.DATABASE, [identifier]).values()]
    if kind == "user" and may_view(request, site, users):
        try:
            pk = users._meta.pk.to_python(identifier)
        except ValidationError:
            return
        names += map(str, users._default_manager.filter(pk=pk).values_list(users.USERNAME_FIELD, flat=True))
    if kind == "api_key":
        names.append(searched_name(key))
    yield from filter(None, names)


def searched_tables(request: HttpRequest, site: AdminSite) -> set[type[models.Model]]:
    """Return the tables in which to search for keys: the tables that the user may view."""
    tables: list[Any] = [Account, get_user_model(), KeyOverride, PlanMembership]
    viewable: set[Any] = {model for model in tables if may_view(request, site, model)}
    if may_operate(request) or may_view(request, site, Access):
        viewable.add(Access)
    return viewable | {used.table for used in used_keys() if may_view(request, site, used.shown_with)}


def row_url(request: HttpRequest, site: AdminSite, model: type[models.Model], page: str = "change") -> str:
    """Return the URL of a row's page, with "{}" in place of the primary key; "" if the user may not open it."""
    if not may_view(request, site, model):
        return ""
    name = f"{site.name}:{model._meta.app_label}_{model._meta.model_name}_{page}"
    return reverse(name, args=[0]).replace("/0/", "/{}/")


def list_url(site: AdminSite, model: type[models.Model], query: dict[str, str]) -> str:
    """Return the URL of the list of a table's rows, with this query; "" if the site does not have the list."""
    if not site.is_registered(model):
        return ""
    url = reverse(f"{site.name}:{model._meta.app_label}_{model._meta.model_name}_changelist")
    return f"{url}?{urlencode(query)}" if query else url


def may_view(request: HttpRequest, site: AdminSite, model: Any) -> bool:
    """Return whether the user may view the rows of a table in the admin."""
    opts, user = model._meta, request.user
    page = site._registry.get(model)
    if page is not None:
        return bool(page.has_view_permission(request))
    # Without a page, the user's permission decides for a table of another app. Tables of this app cannot be viewed.
    names = (f"{opts.app_label}.{action}_{opts.model_name}" for action in ("view", "change"))
    return not is_own(opts.app_label) and any(user.has_perm(name) for name in names)
