"""Warn of unknown names in a row: a scope or meter that no view has, or a key that nobody has.

Unknown names are not errors, because a view or a user with this name may be added later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.db.models import Model
from django.utils.translation import gettext as _
from django.views import View

from ratelimits import as_code
from ratelimits.conf import conf
from ratelimits.models import Access, Account, KeyOverride, Plan, PlanMembership, Rule
from ratelimits.models.fields.scopes import split_scope
from ratelimits.unknown_names.urlconf import named_by_views

_METHODS = frozenset(map(str.upper, View.http_method_names))


def in_row(row: Model) -> Iterator[str]:
    """Yield a sentence for each unknown name in a saved row."""
    if isinstance(row, Rule):
        yield from in_rule(row.scope, row.meter)
    elif isinstance(row, Plan):
        included, priced = row.inclusions.values_list("meter", flat=True), row.prices.values_list("meter", flat=True)
        for meter in sorted({*included, *priced}):
            yield from in_rule("*", meter)
    elif isinstance(row, KeyOverride | PlanMembership):
        yield from in_key(row.key)
    elif isinstance(row, Access):
        yield from in_key(row.target)


def in_document(document: as_code.Document) -> Iterator[tuple[str, str]]:
    """Yield each unknown name in a document of rules as code, as (the plan or rule, a sentence about the name)."""
    for slug, plan in document["plans"].items():
        for meter in sorted({*plan.get("includes", {}), *plan.get("prices", {})}):
            yield from ((f"plan “{slug}”", sentence) for sentence in in_rule("*", meter))
    for entry in document["rules"]:
        names = entry.get("scope", "*"), entry.get("meter", "requests")
        yield from ((f"rule {as_code.quoted_name(entry)}", sentence) for sentence in in_rule(*names))


def in_rule(scope: str, meter: str) -> Iterator[str]:
    """Yield a sentence for a scope or a meter that no view of the URLconf names, and for each unknown HTTP method."""
    in_views, (scope, methods) = named_by_views(), split_scope(scope)
    if scope != "*" and in_views.scopes is not None and scope not in in_views.scopes:
        text = _("No view has the scope “%(scope)s”, so the rule limits nothing yet. Scopes of views: %(known)s.")
        yield text % {"scope": scope, "known": ", ".join(sorted(in_views.scopes - {"*"})) or "–"}
    for method in sorted(methods - _METHODS):
        text = _("HTTP has no method “%(method)s”. Methods: %(known)s.")
        yield text % {"method": method, "known": ", ".join(sorted(_METHODS))}
    if in_views.meters is not None and meter not in in_views.meters | conf.UNITS.keys():
        text = _("No view has a cost in “%(meter)s”, so this meter counts nothing yet. Meters of views: %(known)s.")
        yield text % {"meter": meter, "known": ", ".join(sorted(in_views.meters))}


def in_key(key: str) -> Iterator[str]:
    """Yield a sentence if a key names a user or account that does not exist. Other kinds of key are not checked."""
    kind, _colon, name = key.partition(":")
    if kind == "user" and not _is_user(name):
        text = _("No user has the primary key “%(name)s”, so nobody has the key %(key)s yet.")
        yield text % {"name": name, "key": key}
    elif kind == "account" and not _is_account(name):
        text = _("No account has the identifier “%(name)s”, so nobody has the key %(key)s yet.")
        yield text % {"name": name, "key": key}


def _is_user(name: str) -> bool:
    users: Any = get_user_model()
    try:
        pk = users._meta.pk.to_python(name)
    except ValidationError:
        return False
    # Requests of user 7 have the key user:7. No request has a key with another spelling, such as user:07.
    return str(pk) == name and users._base_manager.filter(pk=pk).exists()


def _is_account(name: str) -> bool:
    """Return whether an account has this identifier. Without RATELIMITS["ACCOUNT"], each user is an account too."""
    return Account.objects.filter(identifier=name).exists() or (conf.ACCOUNT is None and _is_user(name))
