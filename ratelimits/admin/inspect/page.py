"""The inspector: a search for keys, and the page of one key."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import models
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.translation import gettext as _

from ratelimits import rules
from ratelimits.admin.inspect.access import shown_access
from ratelimits.admin.inspect.limits import Pages, shown_limits
from ratelimits.admin.inspect.moments import MAX_LENGTH, NoMomentError, typed_moment
from ratelimits.admin.inspected import inspect_url
from ratelimits.admin.operate.chosen_key import MAX_TEXT, list_url, may_view, names_of, row_url, searched_tables
from ratelimits.admin.operate.confirming import may_operate
from ratelimits.admin.operate.running import running_overrides
from ratelimits.admin.readonly import ReadOnlyAdmin
from ratelimits.identity import Identity
from ratelimits.models import Access, Account, Inspect, KeyOverride, KeyReset, PlanMembership, Rule
from ratelimits.models.access.targets import canonical
from ratelimits.models.keys import spelled_key
from ratelimits.naming import is_shown
from ratelimits.quota.standings import live_limits, with_text
from ratelimits.rules import RulesUnavailable, Snapshot
from ratelimits.rules.access import AccessRow
from ratelimits.status.additions import InspectedKey, nothing, registered
from ratelimits.status.keys import (
    MAX_KEYS,
    KnownKey,
    known_accounts,
    known_keys,
    looks_secret,
    typed_key,
)
from ratelimits.status.operating import NO_ACCOUNT, NothingDoneError, UnknownAccountError, identity_of


@admin.register(Inspect)
class InspectAdmin(ReadOnlyAdmin):
    """The inspector. It replaces Django's list of rows.

    A user sees only the parts of the page whose rows the user may view.
    """

    def get_urls(self) -> list[URLPattern]:
        """Return the URLs of the page and of its search."""
        view = self.admin_site.admin_view
        return [
            path("", view(self.changelist_view), name="ratelimits_inspect_changelist"),
            path("keys/", view(self.keys_view), name="ratelimits_inspect_keys"),
            path("accounts/", view(self.accounts_view), name="ratelimits_inspect_accounts"),
        ]

    def keys_view(self, request: HttpRequest) -> HttpResponse:
        """Return, as JSON, the known keys that contain the text `?q=`, or whose name contains it."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        return JsonResponse({"keys": _Page(self.admin_site, request).keys(request.GET.get("q", "").strip())})

    def accounts_view(self, request: HttpRequest) -> HttpResponse:
        """Return, as JSON, the known accounts whose identifier or name contains the text `?q=`."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        return JsonResponse({"keys": _Page(self.admin_site, request).accounts(request.GET.get("q", "").strip())})

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show the page of the key `?q=`, or a list of the keys that contain this text.

        `?account=` is the account of the key, and `?at=` is a moment for which the user asks.
        """
        if not self.has_view_permission(request):
            raise PermissionDenied
        text, account, typed_at = (request.GET.get(name, "").strip() for name in ("q", "account", "at"))
        context = {
            **self.admin_site.each_context(request),
            "title": _("Inspector: why was a request refused?"),
            "opts": self.model._meta,
            "q": text[:MAX_TEXT],
            "account": account[:MAX_TEXT],
            "at": typed_at[:MAX_LENGTH],
            "knows_past": any(added.inspector is not nothing for added in registered),
            "none": NO_ACCOUNT,
            **_Page(self.admin_site, request, typed_at).context(text, account),
            **(extra_context or {}),
        }
        return TemplateResponse(request, "ratelimits/admin/inspect.html", context)


class _Page:
    """Makes the content of the page. The content has only the parts that the user may view."""

    def __init__(self, site: admin.AdminSite, request: HttpRequest, typed_at: str = "") -> None:
        self._site, self._request, self._typed_at = site, request, typed_at

    def context(self, text: str, account: str) -> dict[str, Any]:
        """Return the template's values for a typed text and a typed account. The account may be ""."""
        if not text:
            return {}
        if max(len(text), len(account)) > MAX_TEXT:
            return {"problem": _("The text is longer than any key: write at most %s characters.") % MAX_TEXT}
        if not is_shown(text + account):
            return {"problem": _("The text has characters that no key can have. Type the key, or a part of it.")}
        key = typed_key(text)
        if key is None:
            return self._search_context(text, account)
        return self._key_context(key, account)

    def keys(self, text: str) -> list[KnownKey]:
        """Return the known keys that contain a text, or whose name contains it."""
        return known_keys(text, self._searched_tables()).keys if _is_searchable(text) else []

    def accounts(self, text: str) -> list[KnownKey]:
        """Return the known accounts whose identifier or name contains a text, each as its identifier and its name."""
        if not _is_searchable(text):
            return []
        found = known_accounts(text, self._searched_tables())
        return [KnownKey(known.key.removeprefix("account:"), known.name) for known in found]

    def _search_context(self, text: str, account: str) -> dict[str, Any]:
        """Return the template's values for a text that is not a key: the keys that contain the text.

        If there is only one such key, return the values for this key.
        """
        if (network := _network(text)) is not None:
            blocks = list_url(self._site, Access, {"q": text}) if self._may_view(Access) else ""
            problem = (
                _("%s is a network. This page shows one address at a time: write an address of the network.") % network
            )
            return {"problem": problem, "blocks_url": blocks}
        result = known_keys(text, self._searched_tables())
        failure = _("The function in RATELIMITS['KEY_SEARCH'] failed, so names that only it finds are missing.")
        more = _("There are more keys: at most %s are listed. Write more of the key or name.") % MAX_KEYS
        failed = {"search_failed": failure if result.failed else ""}
        if len(result.keys) == 1:
            return self._key_context(result.keys[0].key, account, result.keys[0].name) | failed
        return failed | {
            "matches": [(known, self._inspect_url(known.key, account)) for known in result.keys],
            "more": more if result.has_more else "",
            "guesses": [] if result.keys or looks_secret(text) else self._guesses(text),
            "secret": not result.keys and looks_secret(text),
        }

    def _guesses(self, text: str) -> list[tuple[str, str]]:
        """Return the keys that a text may mean, such as "user:<text>", each with the URL of its page."""
        guesses = []
        for kind in ("user", "api_key", "account"):
            key = typed_key(spelled_key(f"{kind}:{text}"))
            if key is not None:
                guesses.append((key, self._inspect_url(key)))
        return guesses

    def _key_context(self, key: str, account: str, name: str = "") -> dict[str, Any]:
        """Return the template's values for a key. `name` is the name with which a search has found the key."""
        context: dict[str, Any] = {"key": key, "name": name}
        try:
            identity = identity_of(key, account)
        except UnknownAccountError as error:
            choices = [*error.accounts, NO_ACCOUNT]
            urls = [(choice, self._inspect_url(key, choice)) for choice in choices]
            return context | {"problem": str(error), "choices": urls, "key": ""}
        except (NothingDoneError, ValidationError) as error:
            return {"problem": " ".join(error.messages) if isinstance(error, ValidationError) else str(error)}
        now, limits, redis_error = time.time(), None, None
        try:
            moment = typed_moment(self._typed_at, now)
        except NoMomentError as error:
            return {"problem": str(error)}
        try:
            if self._may_view(Rule):
                limits, redis_error = live_limits(identity)
                limits = with_text(limits, key)
            snapshot = rules.current()
        except RulesUnavailable as error:
            return {"problem": _("The rules cannot be read: %s") % error}
        if limits is not None:
            access = snapshot.access(identity)
            context["limits"] = shown_limits(limits, identity, snapshot.rows.plans, self._pages(), access, key)
            context["decided_by_access"] = "" if access is None else _decided_text(access)
            context["may_have_owner_rules"] = identity.api_key is not None and _may_count_by_owner(snapshot, identity)
        if redis_error is not None:
            context["redis_problem"] = (
                _("Redis does not answer, so the remaining permits are not known: %s") % redis_error
            )
        context["key_account"], context["is_user"] = identity.account_id, identity.user is not None
        if identity.account_id and identity.account != key:
            context["key_account_url"] = self._inspect_url(f"account:{identity.account_id}")
            context["key_account_name"] = ", ".join(
                names_of(self._request, self._site, f"account:{identity.account_id}")
            )
        context["names"] = list(names_of(self._request, self._site, key))
        keys = {identity.api_key, identity.user, identity.account, identity.address, key}
        context["running"] = running_overrides(self._request, self._site, keys)
        if may_operate(self._request) or self._may_view(Access):
            context["access"] = shown_access(identity, key, snapshot)
        account_url = context.get("key_account_url", "")
        asked = InspectedKey(self._request, self._site, identity, key, now, moment, account_url, self._inspect_url)
        context["panels"] = [panel for added in registered for panel in added.inspector(asked)]
        context["actions"] = list(self._actions(key, account))
        return context

    def _inspect_url(self, key: str, account: str = "") -> str:
        """Return the URL of this page about another key, for the same moment."""
        return inspect_url(key, account, self._site.name, self._typed_at)

    def _actions(self, key: str, account: str) -> Iterator[tuple[str, str]]:
        """Yield the actions that the user may take for a key, each with the URL of its form."""
        pages, query = self._pages(), urlencode({"key": key} | ({"account": account} if account else {}))
        if pages.grant:
            yield _("Give more"), f"{pages.grant}?{query}"
        if pages.reset:
            yield _("Reset a limit"), f"{pages.reset}?{query}"
        if may_operate(self._request) and self._site.is_registered(Access):
            add = reverse(f"{self._site.name}:ratelimits_access_add")
            yield _("Block"), f"{add}?{urlencode({'effect': 'block', 'target': key})}"
            yield _("Allow"), f"{add}?{urlencode({'effect': 'allow', 'target': key})}"
        page = self._site._registry.get(KeyOverride)
        if page is not None and page.has_add_permission(self._request):
            add = reverse(f"{self._site.name}:ratelimits_keyoverride_add")
            yield _("Add an override"), f"{add}?{urlencode({'key': key})}"

    def _pages(self) -> Pages:
        site = self._site.name
        operate = may_operate(self._request)
        return Pages(
            rule=self._row_url(Rule),
            override=self._row_url(KeyOverride),
            membership=self._row_url(PlanMembership),
            account=self._row_url(Account),
            reset=reverse(f"{site}:ratelimits_keyreset_add") if operate and self._site.is_registered(KeyReset) else "",
            grant=reverse(f"{site}:ratelimits_access_grant") if operate and self._site.is_registered(Access) else "",
            inspect=reverse(f"{site}:ratelimits_inspect_changelist"),
        )

    def _row_url(self, model: type[models.Model]) -> str:
        return row_url(self._request, self._site, model)

    def _searched_tables(self) -> set[type[models.Model]]:
        return searched_tables(self._request, self._site)

    def _may_view(self, model: Any) -> bool:
        return may_view(self._request, self._site, model)


def _is_searchable(text: str) -> bool:
    return bool(text) and len(text) <= MAX_TEXT and is_shown(text)


def _decided_text(access: AccessRow) -> str:
    """Return a sentence about the block or allow that decides the requests of a key before any rule."""
    if access.blocks:
        text = _("A block of %(target)s refuses every request of this key now, with %(status)s, before any rule.")
    else:
        text = _("An allow of %(target)s admits every request of this key now, before any rule.")
    return text % {"target": access.target, "status": access.status}


def _may_count_by_owner(snapshot: Snapshot, identity: Identity) -> bool:
    """Return whether it is possible that a rule counts requests of an API key under an unknown user or account.

    The inspector never knows the user of an API key. It knows the account only if `identity` has one.
    """
    unknown = {"user"} if identity.account else {"user", "account"}
    return any(row.key_kind in unknown and row.mode != "off" for row in snapshot.rows.rules.values())


def _network(text: str) -> str | None:
    """Return the network that a text names; None if the text names no network."""
    try:
        target = canonical(text)
    except ValidationError:
        return None
    return target.removeprefix("ip:") if target.startswith("ip:") else None
