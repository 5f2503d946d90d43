"""System checks of RATELIMITS["PATHS"]: whether the paths, which the middleware limits, are those of views."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from django.apps import AppConfig
from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.urls import LocalePrefixPattern, URLPattern, URLResolver
from django.urls.resolvers import RegexPattern, RoutePattern
from django.utils.functional import Promise

from ratelimits.checks import listed
from ratelimits.conf import conf
from ratelimits.unknown_names import all_patterns

#: A path that only views for all paths have.
_NOWHERE = "/ratelimits/no-such-path/"
#: A parameter in a route, such as "<int:pk>".
_PARAMETER = re.compile(r"<(?:[^>:]+:)?([^>]+)>")
#: The literal text with which a regular expression begins, and the rest of the expression.
_LITERAL = re.compile(r"(?:\^|\\A)?((?:(?:[\w/~@%=:,-]|\\[^\w])(?![*?+{]))*)(.*)", re.DOTALL)
#: A group of words in a regular expression, such as "(?P<language>en|de)".
_WORDS = re.compile(r"\((?:\?:|\?P<\w+>)?([\w-]+(?:\|[\w-]+)*)\)(?![*?+{])")
#: A converter's expression that repeats one class of characters, such as "[0-9]+".
_ONE_CLASS = re.compile(r"\[[^\]]+\]\+")


@checks.register("ratelimits")
def check_paths(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Warn of paths in PATHS with which no view begins: perhaps they limit nothing."""
    paths = _paths()
    if not paths:
        return []
    patterns = all_patterns()
    catch_alls = set(views_below(patterns, _NOWHERE))
    unknown = [path for path in paths if not _is_known(path, patterns, catch_alls)]
    if not unknown:
        return []
    script_name = _script_name()
    prefix = f", without {script_name!r}, the FORCE_SCRIPT_NAME" if script_name else ", without the SCRIPT_NAME"
    return [
        checks.Warning(
            "No view has a URL that begins with these paths of RATELIMITS['PATHS']:"
            f" {listed([repr(path) for path in unknown])}.",
            hint=f"Write each path as in the URLconf{prefix}, and with the language if the view is in i18n_patterns. If"
            " a middleware answers such paths or chooses another URLconf, add 'ratelimits.W008' to"
            " SILENCED_SYSTEM_CHECKS.",
            id="ratelimits.W008",
        )
    ]


@checks.register("ratelimits")
def check_languages_of_paths(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Warn of views in `i18n_patterns` that PATHS limits in some languages only: clients can choose another one."""
    paths = _paths()
    patterns = all_patterns() if paths else []
    languages = _languages(patterns)
    limited = {
        language: {view for path in paths for view in _views_in(patterns, path.removeprefix("/"), language)}
        for language in languages
    }
    views = {view: None for of_language in limited.values() for view in of_language}
    partly = {view: [language for language in languages if view not in limited[language]] for view in views}
    names = [f"{view.lookup_str} (not in {', '.join(without)})" for view, without in partly.items() if without]
    if not names:
        return []
    return [
        checks.Warning(
            f"RATELIMITS['PATHS'] limits these views in some languages only: {listed(sorted(names))}.",
            hint="Add the path of each language of LANGUAGES to PATHS, such as '/de/login/' beside '/en/login/'. If a"
            " language needs no limit, add 'ratelimits.W009' to SILENCED_SYSTEM_CHECKS.",
            id="ratelimits.W009",
        )
    ]


def _paths() -> list[str]:
    """Return the paths; none if PATHS is not valid, which `check_settings` reports, or if there is no URLconf."""
    try:
        return list(conf.PATHS) if getattr(settings, "ROOT_URLCONF", None) else []
    except ImproperlyConfigured:
        return []


def _script_name() -> str:
    return (settings.FORCE_SCRIPT_NAME or "").rstrip("/")


def _is_known(path: str, patterns: Sequence[Any], catch_alls: set[URLPattern]) -> bool:
    """Return whether a view, or a static file, has a URL that begins with a path."""
    script_name = _script_name()
    views = set(views_below(patterns, path))
    if script_name and path.startswith(f"{script_name}/"):
        # A view for all paths also has this one, but no request does: Django takes the script name away.
        views -= catch_alls
    return bool(views) or any(path.startswith(place) for place in _places_of_files())


def _places_of_files() -> Iterator[str]:
    """Yield the paths of static files and media on this site. A middleware can serve them without a view."""
    for url in (settings.STATIC_URL, settings.MEDIA_URL):
        place = urlsplit(url or "")
        # Django puts the script name before these settings, also before an empty MEDIA_URL, which is no place.
        below = place.path.removeprefix(_script_name()).lstrip("/")
        if not place.netloc and below:
            yield f"/{below}"


def _languages(patterns: Iterable[Any]) -> list[str]:
    """Return the languages that URLs name; none if there are no `i18n_patterns`."""
    is_translated = any(isinstance(entry.pattern, LocalePrefixPattern) for entry in patterns)
    return [code for code, _name in settings.LANGUAGES] if is_translated else []


def views_below(patterns: Sequence[Any], path: str) -> Iterator[URLPattern]:
    """Yield the views of which a URL begins with a path, in any language."""
    for language in _languages(patterns) or [settings.LANGUAGE_CODE]:
        yield from _views_in(patterns, path.removeprefix("/"), language)


def _views_in(patterns: Iterable[Any], path: str, language: str) -> Iterator[URLPattern]:
    for entry in patterns:
        rest = _rest(entry.pattern, path, language, is_view=isinstance(entry, URLPattern))
        if rest is None:
            continue
        if isinstance(entry, URLResolver):
            yield from _views_in(entry.url_patterns, rest, language)
        elif not getattr(entry.callback, "__qualname__", "").endswith("AdminSite.catch_all_view"):
            yield entry  # the admin's view for all other paths only says that they do not exist


def _rest(pattern: Any, path: str, language: str, *, is_view: bool) -> str | None:
    """Return what a pattern leaves of a path for the patterns below it; None if no URL can begin like this.

    If the path ends before the pattern does, nothing is left: "". What is not understood leaves nothing either, so that
    no warning is wrong. No converter is called.
    """
    if isinstance(pattern, LocalePrefixPattern):
        is_default = language == settings.LANGUAGE_CODE and not pattern.prefix_default_language
        prefix = "" if is_default else f"{language}/"
        return path.removeprefix(prefix) if path.startswith(prefix) else _nothing_if(prefix.startswith(path))
    if not isinstance(pattern, (RoutePattern, RegexPattern)):
        return ""
    if any(isinstance(text, Promise) for text in vars(pattern).values()):
        return ""  # another text in each language
    match = pattern.regex.search(path)
    if match is not None:
        return "" if is_view else path[match.end() :]
    if isinstance(pattern, RoutePattern):
        return _nothing_if(_is_begun_route(pattern, path))
    return _nothing_if(_is_begun_regex(str(pattern), path))


def _nothing_if(is_begun: bool) -> str | None:
    return "" if is_begun else None


def _is_begun_route(pattern: RoutePattern, path: str) -> bool:
    """Return whether a path is a beginning of a URL of a route."""
    before = ""
    for index, part in enumerate(_PARAMETER.split(str(pattern))):
        if index % 2:
            whole = pattern.converters[part].regex
            begun = f"{whole[:-1]}*" if _ONE_CLASS.fullmatch(whole) else r"[\s\S]*"
        else:
            whole = re.escape(part)
            begun = "|".join(re.escape(part[:end]) for end in range(len(part) + 1))
        if re.fullmatch(f"{before}(?:{begun})", path):
            return True
        before += f"(?:{whole})"
    return False


def _is_begun_regex(expression: str, path: str) -> bool:
    """Return whether a path is perhaps a beginning of a text that a regular expression finds.

    Only the literal text with which the expression begins is compared.
    """
    for alternative in _alternatives(expression):
        literal, rest = _LITERAL.fullmatch(alternative).groups()  # type: ignore[union-attr]
        literal = literal.replace("\\", "")
        ends = rest in ("", "$", r"\Z")
        if literal.startswith(path) or (not ends and path.startswith(literal)):
            return True
    return False


def _alternatives(expression: str) -> Iterator[str]:
    """Yield the alternatives of a regular expression. Of its groups, only the first one with words is considered."""
    group = _WORDS.search(expression)
    for word in group[1].split("|") if group is not None else [""]:
        whole = expression if group is None else f"{expression[: group.start()]}{word}{expression[group.end() :]}"
        yield from whole.split("|")
