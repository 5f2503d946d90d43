"""The apps of the package, as a project lists them in INSTALLED_APPS, and their tables."""

from __future__ import annotations

from typing import Any

from django.apps import apps

#: What INSTALLED_APPS needs for limits, usage and bills.
OWN = ("ratelimits", "ratelimits.usage", "ratelimits.billing")


def own_models(*, include_auto_created: bool = False) -> list[Any]:
    """Return the models of the installed apps of the package, in the order of the apps."""
    configs = [apps.get_app_config(name.replace(".", "_")) for name in OWN if apps.is_installed(name)]
    return [model for config in configs for model in config.get_models(include_auto_created=include_auto_created)]


def list_path(model: str) -> str:
    """Return the path of the admin's list of a table of the package, by the lower-case name of its model."""
    (label,) = {table._meta.app_label for table in own_models() if table._meta.model_name == model}
    return f"/admin/{label}/{model}/"
