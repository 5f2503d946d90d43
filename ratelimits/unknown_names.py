"""Find unknown names in a row: a scope, meter or key that no view has, or a key that nobody has.

Unknown names are not errors, because a view or a user with this name can be added later. The scopes, meters and keys of
the project are those in the views of its URLconf, and those that the decorator `limited` was given, also where no URL
leads to the decorated function: a project can decorate functions that views of other packages call, such as the method
`serve` of a page of Wagtail.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from inspect import isfunction
from typing import Any, NamedTuple

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db.models import Model
from django.urls import URLPattern, URLResolver, get_resolver
from django.utils.translation import gettext as _
from django.views import View

from ratelimits import as_code
from ratelimits.conf import conf
from ratelimits.models import Access, Account, KeyOverride, Plan, PlanMembership, Rule
from ratelimits.models.accounts import meters_of_plans
from ratelimits.models.fields import view_key_texts
from ratelimits.models.fields.scopes import names_in, split_scope
from ratelimits.models.users import accounts_without_rows, existing_users
from ratelimits.naming import without_secret
from ratelimits.view_keys import sources_of

#: If a view names no cost, `QuotaThrottle` and `limited` count in this meter.
_DEFAULT_METER = "requests"
_ATTRIBUTES = "throttle_scope", "throttle_cost", "throttle_key"
_METHODS = frozenset(map(str.upper, View.http_method_names))


class Given(NamedTuple):
    """The arguments of one use of the decorator, as far as they can name a scope, a meter or a key.

    cost  None or the names of the meters; `callable` if the cost is computed for each request
    key   None or the keys
    """

    scope: str
    cost: Any
    key: tuple[Any, ...] | None


#: Equal arguments are in it once. So it has as many entries as the code of the project has different arguments.
_given: dict[Given, None] = {}


def note_decorator(scope: object, cost: Any, key: Any) -> None:
    """Remember the arguments of the decorator. Leave out a scope that is translated, and whatever is not valid."""
    if not isinstance(scope, str):
        return
    if isinstance(cost, Mapping):
        meters: Any = tuple(name for name in cost if isinstance(name, str))
    else:
        meters = callable if callable(cost) or isinstance(cost, str) else None
    each: Iterable[Any] = key if isinstance(key, (list, tuple)) else (key,)
    valid = (one for one in each if isinstance(one, Hashable) and (isinstance(one, str) or callable(one)))
    keys: tuple[Any, ...] = tuple(valid)
    _given[Given(scope, meters, keys or None)] = None


def all_given() -> tuple[Given, ...]:
    """Return the arguments of all uses of the decorator in the modules that this process has imported."""
    return tuple(_given)


def forget_decorators() -> None:
    """Forget all of them. Tests call this, because the functions of one test are not those of the next."""
    _given.clear()


@dataclass(frozen=True, slots=True)
class ViewNames:
    """The scopes and meters of all views, and the keys that they give, such as "header:X-Tenant".

    A field is None if a view computes its scope, its cost or its key for each request: then other names are possible
    too.
    """

    scopes: frozenset[str] | None
    meters: frozenset[str] | None
    keys: frozenset[str] | None


@dataclass(slots=True)
class _NamesInCode:
    """The scopes, meters and keys that are written in the code of views.

    every_scope  whether the scopes of all views are written in the code
    every_meter  whether the meters of all views are written in the code
    every_key    whether the keys of all views are written in the code
    """

    scopes: set[str]
    meters: set[str]
    keys: set[str]
    every_scope: bool = True
    every_meter: bool = True
    every_key: bool = True


def named_by_views() -> ViewNames:
    """Return the scopes, meters and keys of all views of ROOT_URLCONF and of all functions with the decorator."""
    names = _names_in_code()
    return ViewNames(
        frozenset(names.scopes) if names.every_scope else None,
        frozenset(names.meters) if names.every_meter else None,
        frozenset(names.keys) if names.every_key else None,
    )


def written_in_views() -> tuple[frozenset[str], frozenset[str]]:
    """Return the scopes and the meters that are written in the code of views and of functions with the decorator.

    Views can compute other scopes and meters for each request.
    """
    names = _names_in_code()
    return frozenset(names.scopes), frozenset(names.meters)


def keys_of_views() -> frozenset[str]:
    """Return the keys that are written in the code of views of ROOT_URLCONF, such as "header:X-Tenant"."""
    return frozenset(_names_in_code().keys)


def _names_in_code() -> _NamesInCode:
    names = _NamesInCode(set(), {_DEFAULT_METER}, set())
    # The middleware limits the paths in PATHS. If PATHS is a list, it names no scopes and no costs.
    all_options = conf.PATHS.values() if isinstance(conf.PATHS, dict) else ()
    of_paths = ((options.get("scope"), options.get("cost"), options.get("key")) for options in all_options)
    for scope, cost, key in (*_options_of_views(all_patterns()), *of_paths, *all_given()):
        if scope is None or isinstance(scope, str):
            names.scopes.add(scope or "*")
        else:
            names.every_scope = False
        if isinstance(cost, Mapping | tuple):
            names.meters |= {meter for meter in cost if isinstance(meter, str)}
        elif cost is not None and not isinstance(cost, int):
            names.every_meter = False
        if isinstance(key, property):
            names.every_key = False
        elif key is not None:
            with suppress(ImproperlyConfigured):  # the first request to the view raises this error
                names.keys |= {source.text for source in sources_of(key)}
    return names


def all_patterns() -> list[URLPattern | URLResolver]:
    """Return the patterns of ROOT_URLCONF, and of the URLconfs that django-tenants uses for some tenants."""
    of_types = [options.get("URLCONF") for options in (getattr(settings, "TENANT_TYPES", None) or {}).values()]
    further = {getattr(settings, "PUBLIC_SCHEMA_URLCONF", None), *of_types} - {None, "", settings.ROOT_URLCONF}
    return [entry for urlconf in (None, *sorted(further)) for entry in get_resolver(urlconf).url_patterns]


def _options_of_views(patterns: Iterable[URLPattern | URLResolver]) -> Iterator[tuple[Any, ...]]:
    """Yield the scope, the cost and the key of each view. They are None for a view that does not name them.

    They are attributes of a view of Django REST framework or of its throttles, or arguments of the decorator.
    """
    for pattern in patterns:
        if isinstance(pattern, URLResolver):
            yield from _options_of_views(pattern.url_patterns)
            continue
        view: Any = pattern.callback
        view_class = getattr(view, "cls", None) or getattr(view, "view_class", None)
        if view_class is not None:
            # Django REST framework has another name for the values given to `as_view`.
            options = getattr(view, "initkwargs", None) or getattr(view, "view_initkwargs", {})
            yield tuple(options.get(name, getattr(view_class, name, None)) for name in _ATTRIBUTES)
            throttles = options.get("throttle_classes", getattr(view_class, "throttle_classes", None)) or ()
            yield from ((None, None, getattr(one, "throttle_key", None)) for one in throttles)
        else:
            yield tuple(getattr(view, name, None) for name in _ATTRIBUTES)
        yield from (function.ratelimits for function in decorated_functions(view))


def decorated_functions(view: Any) -> Iterator[Any]:
    """Yield the functions of a view to which the project has applied the decorator `limited`.

    The decorator stores the scope, the cost and the key in the attribute `ratelimits`. A function can be yielded twice.
    """
    functions = [view]
    view_class = getattr(view, "cls", None) or getattr(view, "view_class", None)
    if view_class is not None:
        methods = ("dispatch", *view_class.http_method_names, *(getattr(view, "actions", None) or {}).values())
        functions += [getattr(view_class, method, None) for method in methods]
        # `api_view` makes a class. The closure of its methods has the decorated function.
        functions += [content for function in functions for content in _closure(function) if isfunction(content)]
    else:
        # django-ninja makes a function for each path. Its closure has an object with the operations of the path.
        for content in _closure(view):
            functions += [getattr(operation, "view_func", None) for operation in getattr(content, "operations", ())]
    yield from (function for function in functions if isinstance(getattr(function, "ratelimits", None), tuple))


def _closure(function: Any) -> list[Any]:
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


def in_row(row: Model) -> Iterator[str]:
    """Yield a sentence for each unknown name in a saved row."""
    if isinstance(row, Rule):
        yield from in_rule(row.scope, row.meter, row.except_scopes, row.view_key)
    elif isinstance(row, Plan):
        for meter in sorted(meters_of_plans(conf.DATABASE, plan=row)):
            yield from in_rule("*", meter)
    elif isinstance(row, KeyOverride | PlanMembership):
        yield from in_key(row.key)
    elif isinstance(row, Access) and (view_key_texts.is_text(row.target) or row.target.startswith("api_key:")):
        yield from in_key(row.target)


def in_document(document: as_code.Document) -> Iterator[tuple[str, str]]:
    """Yield each unknown name in a document of rules as code, as (the plan or rule, a sentence about the name)."""
    for slug, plan in document["plans"].items():
        for meter in sorted({meter for word in as_code.parts for meter in plan.get(word, {})}):
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
