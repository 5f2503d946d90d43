"""System checks of the project's authentication: whether the app can know an API key again. docs/requests/who.md."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from django.apps import AppConfig, apps
from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured

from ratelimits.checks import listed
from ratelimits.conf import conf
from ratelimits.moving import FoundView, views

#: Modules with short-lived tokens, by package. A user gets another token every few minutes, or at each login.
_SHORT_LIVED = {
    "django-oauth-toolkit": ("oauth2_provider",),
    "djangorestframework-simplejwt": ("rest_framework_simplejwt",),
    "django-rest-knox": ("knox",),
    # Most projects use other parts of this package, for logins.
    "the tokens of django-allauth": ("allauth.headless.contrib.rest_framework", "allauth.idp.oidc.contrib"),
}
#: A package whose permission class checks a key. Django REST framework does not know this key.
_UNSEEN = "rest_framework_api_key"
_PAGE = 'docs/requests/who.md ("Who is the caller") has it'


@checks.register("ratelimits")
def check_credentials(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Warn of known packages for which the project must say what the API key of a request is, if it does not say so."""
    try:
        if conf.API_KEY is not None:
            return []
    except ImproperlyConfigured:
        return []  # `check_settings` reports the invalid setting.
    return [*_short_lived(), *_unseen()]


@checks.register("ratelimits")
def check_decorated_views(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Warn of views of Django REST framework that `limited` decides before the framework authenticates the caller."""
    names = sorted({view.name for view in _views() if _is_decided_early(view)})
    if not names:
        return []
    return [
        checks.Warning(
            "`limited` decides requests to these views before Django REST framework authenticates them, so a request"
            f" with a token has no user and no API key: {listed(names)}.",
            hint="Write @limited below @api_view, @method_decorator(limited(…)) at a method such as `get` instead of"
            " `dispatch`, or QuotaThrottle instead of the decorator. If rules of these views need neither users nor API"
            " keys, or if RATELIMITS['USER'] or ['API_KEY'] reads them from the header, add 'ratelimits.W013' to"
            " SILENCED_SYSTEM_CHECKS.",
            id="ratelimits.W013",
        )
    ]


def _is_decided_early(view: FoundView) -> bool:
    """Return whether `limited` is around a whole view of Django REST framework, which knows more than sessions."""
    framework = sys.modules.get("rest_framework.authentication")
    # Only the framework gives its views the attribute `cls`. `as_view` gives a view the attributes of `dispatch`.
    if framework is None or not hasattr(view.view, "cls") or not hasattr(view.view, "ratelimits"):
        return False
    authenticators = view.option("authentication_classes") or ()
    return any(not _is_subclass(one, framework.SessionAuthentication) for one in authenticators)


def _is_subclass(value: object, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base)


def _short_lived() -> Iterator[checks.CheckMessage]:
    used = [*_apps(), *_classes()]
    names = [
        name
        for name, modules in _SHORT_LIVED.items()
        if any(f"{one}.".startswith(f"{module}.") for one in used for module in modules)
    ]
    if names:
        yield checks.Warning(
            f"The project uses {' and '.join(names)}. These tokens are short-lived, but RATELIMITS['API_KEY'] is not"
            " set: no API key outlasts its token.",
            hint="Set RATELIMITS['API_KEY'] to a function that returns what stays the same, such as the application or"
            f" the user: {_PAGE}. Otherwise rules per API key begin again with each token or cannot be applied, and a"
            " token without a user is a new account.",
            id="ratelimits.W006",
        )


def _unseen() -> Iterator[checks.CheckMessage]:
    if _UNSEEN in _apps():
        yield checks.Warning(
            "The project uses djangorestframework-api-key, but RATELIMITS['API_KEY'] is not set: a request with such a"
            " key has no API key and no account, and is counted as an anonymous one.",
            hint=f"Set RATELIMITS['API_KEY'] to a function that finds the row of the key: {_PAGE}. If an"
            " authentication class of your own sets request.auth to this row, add 'ratelimits.W007' to"
            " SILENCED_SYSTEM_CHECKS.",
            id="ratelimits.W007",
        )


def _apps() -> list[str]:
    return [config.name for config in apps.get_app_configs()]


def _views() -> list[FoundView]:
    return views() if getattr(settings, "ROOT_URLCONF", None) else []


def _classes() -> Iterator[str]:
    """Yield the modules of all authentication classes, and of their base classes, in the settings and in the views.

    Views of Django REST framework that name no classes have those of the settings. So no class is imported here.
    """
    framework = getattr(settings, "REST_FRAMEWORK", None) or {}
    for path in framework.get("DEFAULT_AUTHENTICATION_CLASSES") or ():
        yield str(path)
    for view in _views():
        for cls in view.option("authentication_classes") or ():
            for base in getattr(cls, "__mro__", ()):
                yield base.__module__
