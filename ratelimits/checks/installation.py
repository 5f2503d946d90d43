"""System checks of the project: distributions with the same import name, apps, foreign keys, the runner of tests."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from django.apps import AppConfig, apps
from django.contrib.auth import get_user_model
from django.core import checks
from django.core.exceptions import ImproperlyConfigured

from ratelimits.conf import embedded
from ratelimits.models.accounts import identifier_references

#: The name of this app on package indexes, and the name of another project's distribution with the same import name.
DISTRIBUTION, OTHER = "django-ratelimits", "ratelimits"


@checks.register("ratelimits")
def check_distribution(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Return an error if the distribution `ratelimits` is installed: it puts its files into the app's folder."""
    try:
        version = distribution(OTHER).version
    except PackageNotFoundError:
        return []
    return [
        checks.Error(
            f"The distribution {OTHER!r} {version} is installed. It is another project with the same import name.",
            hint=f"Perhaps it has replaced files of this app. Run: pip uninstall --yes {OTHER} {DISTRIBUTION},"
            f" then pip install {DISTRIBUTION}. Look for a requirement that names {OTHER!r}.",
            id="ratelimits.E010",
        )
    ]


@checks.register("ratelimits")
def check_users(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Return an error if the project has no model of users. The app's tables name the users who change them."""
    try:
        get_user_model()
    except ImproperlyConfigured as error:
        return [
            checks.Error(
                f"The project has no users, but the app's tables name the users who change them: {error}.",
                hint="Add 'django.contrib.auth' and 'django.contrib.contenttypes' to INSTALLED_APPS, or name a model of"
                " your own in AUTH_USER_MODEL. The app needs no other app of Django.",
                id="ratelimits.E015",
            )
        ]
    return []


@checks.register("ratelimits")
def check_history_pages(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Return an error if the project has an admin, but not the templates of its pages of history."""
    if not apps.is_installed("django.contrib.admin") or apps.is_installed("simple_history"):
        return []
    return [
        checks.Error(
            "INSTALLED_APPS has django.contrib.admin but not simple_history, so the admin cannot show the history of"
            " rules.",
            hint="Add 'simple_history' to INSTALLED_APPS. A project without the admin does not need it.",
            id="ratelimits.E013",
        )
    ]


@checks.register("ratelimits")
def check_references(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Return a warning for each foreign key of the project that refers to accounts by their identifier."""
    return [
        checks.Warning(
            f"{key.model._meta.label}.{key.name} refers to accounts by their identifier, which can change. So the text"
            " of an account to which a row refers cannot be moved to another customer, nor can its customer be erased.",
            hint="If the foreign key means the customer, leave to_field out: the primary key never changes. If it means"
            " the text, store the text without a foreign key.",
            obj=key,
            id="ratelimits.W058",
        )
        for key in identifier_references()
    ]


@checks.register("ratelimits")
def check_test_runner(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Return a warning if `manage.py test` runs with a runner that has not told the app of it."""
    if sys.argv[1:2] != ["test"] or embedded.own:  # `ratelimits.testing.prepare_tests` has set this
        return []
    return [
        checks.Warning(
            "The command `test` runs, but TEST_RUNNER does not tell ratelimits. So the app works as in production: it"
            " counts the requests of the tests as usage in the Redis database of the settings, from where they reach"
            " the bill, and does not see rules that a TestCase adds.",
            hint="Write TEST_RUNNER = 'ratelimits.testing.runner.QuotaTestRunner', or add QuotaTestRunnerMixin of this"
            " module to your own runner.",
            id="ratelimits.W012",
        )
    ]
