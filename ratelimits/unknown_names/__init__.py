"""Warn about unknown names in a row: a scope, meter or key that no view has, or a key that nobody has.

Unknown names are not errors, because a view or a user with this name can be added later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from django.db.models import Model
from django.utils.translation import gettext as _
from django.views import View

from ratelimits import as_code
from ratelimits.conf import conf
from ratelimits.models import Access, Account, KeyOverride, Plan, PlanMembership, Rule
from ratelimits.models.fields import view_key_texts
from ratelimits.models.fields.scopes import names_in, split_scope
from ratelimits.models.users import accounts_without_rows, existing_users
from ratelimits.naming import without_secret
from ratelimits.unknown_names.urlconf import named_by_views

_METHODS = frozenset(map(str.upper, View.http_method_names))


def in_row(row: Model) -> Iterator[str]:
    """Yield a sentence for each unknown name in a saved row."""
    if isinstance(row, Rule):
        yield from in_rule(row.scope, row.meter, row.except_scopes, row.view_key)
    elif isinstance(row, Plan):
        included, priced = row.inclusions.values_list("meter", flat=True), row.prices.values_list("meter", flat=True)
        for meter in sorted({*included, *priced}):
            yield from in_rule("*", meter)
    elif isinstance(row, KeyOverride | PlanMembership):
        yield from in_key(row.key)
    elif isinstance(row, Access) and (view_key_texts.is_text(row.target) or row.target.startswith("api_key:")):
        yield from in_key(row.target)


def in_document(document: as_code.Document) -> Iterator[tuple[str, str]]:
    """Yield each unknown name in a document of rules as code, as (the plan or rule, a sentence about the name)."""
    for slug, plan in document["plans"].items():
        for meter in sorted({*plan.get("includes", {}), *plan.get("prices", {})}):
            yield from ((f"plan “{slug}”", sentence) for sentence in in_rule("*", meter))
    for entry in document["rules"]:
        names = (
            entry.get("scope", "*"),
            entry.get("meter", "requests"),
            entry.get("except_scopes", ""),
            entry.get("view_key", ""),
        )
        yield from ((f"rule {as_code.quoted_name(entry)}", sentence) for sentence in in_rule(*names))


def unknown_scopes(scopes: Iterable[str]) -> set[str]:
    """Return those of these scopes of rules that no view and no outbound call has. A scope can name methods."""
    known = named_by_views().scopes
    if known is None:
        return set()
    return {scope for scope in scopes if split_scope(scope)[0] not in {"*", *known, *conf.OUTBOUND_SCOPES}}


def in_rule(scope: str, meter: str, except_scopes: str = "", view_key: str = "") -> Iterator[str]:
    """Yield a sentence for a scope, a meter or a key that no view names, and for unknown HTTP methods.

    `except_scopes` is the list of scopes in which the rule does not apply. `view_key` is the key of the view that the
    rule counts; "" if the rule names none.
    """
    # `in_views.scopes` or `in_views.meters` is None if views can have scopes or meters that are not known here.
    in_views = named_by_views()
    scope, methods = split_scope(scope)
    if scope in conf.OUTBOUND_SCOPES:
        return  # outbound calls name their meters in code that is not searched
    if scope != "*" and in_views.scopes is not None and scope not in in_views.scopes:
        text = _("No view has the scope “%(scope)s”, so the rule limits nothing yet. Scopes of views: %(known)s.")
        yield text % {"scope": scope, "known": ", ".join(sorted(in_views.scopes - {"*"})) or "–"}
    for name in names_in(except_scopes):
        if in_views.scopes is not None and name not in in_views.scopes:
            text = _("No view has the scope “%(scope)s”, so this exception has no effect. Scopes of views: %(known)s.")
            yield text % {"scope": name, "known": ", ".join(sorted(in_views.scopes - {"*"})) or "–"}
    for method in sorted(methods - _METHODS):
        text = _("HTTP has no method “%(method)s”. Methods: %(known)s.")
        yield text % {"method": method, "known": ", ".join(sorted(_METHODS))}
    if view_key:
        yield from _in_view_keys({view_key}).values()
    declared = {*conf.UNITS, *(conf.METERS or ())}
    if in_views.meters is not None and meter not in in_views.meters | declared:
        text = _("No view has a cost in “%(meter)s”, so this meter counts nothing yet. Meters of views: %(known)s.")
        yield text % {"meter": meter, "known": ", ".join(sorted(in_views.meters))}


def _in_view_keys(sources: set[str]) -> dict[str, str]:
    """Return a sentence for each of these keys, such as "header:X-Tenant", that no view of the URLconf gives."""
    known = named_by_views().keys if sources else None
    if known is None:
        return {}
    text, shown = (
        _("No view gives the key “%(source)s” yet. Keys of views: %(known)s."),
        ", ".join(sorted(known)) or "–",
    )
    return {source: text % {"source": source, "known": shown} for source in sources - known}


def in_key(key: str) -> Iterator[str]:
    """Yield a sentence if a key names a user or account that does not exist, or a key that no request has.

    Other kinds of key are not checked.
    """
    yield from in_keys([key]).values()


def in_keys(keys: Iterable[str]) -> dict[str, str]:
    """Return, by key, a sentence for each key that names a user or account that does not exist or that no request has.

    The latter are keys that no view gives, and API keys with their secret text. Other kinds of key are not checked.
    This takes a few queries for any number of keys.
    """
    source_of_key: dict[str, str] = {}
    digests: dict[str, str] = {}
    named: dict[str, set[str]] = {"user": set(), "account": set()}
    for key in keys:
        kind, _colon, name = key.partition(":")
        if kind in named:
            named[kind].add(name)
        elif kind == "api_key":
            digests[key] = without_secret(name)
        elif view_key_texts.is_text(key):
            source_of_key[key] = key.partition("=")[0]
    accounts = set(Account.objects.filter(identifier__in=named["account"]).values_list("identifier", flat=True))
    texts = {
        "user": _("No user has the primary key “%(name)s”, so nobody has the key %(key)s yet."),
        "account": _("No account has the identifier “%(name)s”, so nobody has the key %(key)s yet."),
    }
    existing = {
        "user": existing_users(named["user"]),
        "account": accounts | accounts_without_rows(named["account"] - accounts),
    }
    unknown = _in_view_keys({*source_of_key.values()})
    sentences = {key: unknown[source] for key, source in source_of_key.items() if source in unknown}
    secret = _(
        "A request has only the digest of an API key that is a text: write %(wanted)s, and delete the row with the text"
        " itself."
    )
    sentences |= {
        key: secret % {"wanted": f"api_key:{name}"} for key, name in digests.items() if key != f"api_key:{name}"
    }
    for kind, names in named.items():
        for name in sorted(names - existing[kind]):
            key = f"{kind}:{name}"
            sentences[key] = texts[kind] % {"name": name, "key": key}
    return sentences
