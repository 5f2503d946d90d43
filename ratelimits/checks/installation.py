"""A system check of the installation: whether another distribution has the import name of this app."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from django.apps import AppConfig
from django.core import checks

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
