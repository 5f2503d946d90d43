"""System checks: every mistake in the settings that can be seen before the first request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core import checks

from ratelimits.conf import DEFAULTS


@checks.register("ratelimits")
def check_setting_names(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Unknown keys in RATELIMITS (a typing error would otherwise pass unnoticed)."""
    return [
        checks.Error(
            f"RATELIMITS has no setting {name!r}.",
            hint=f"Known settings: {', '.join(sorted(DEFAULTS))}.",
            id="ratelimits.E001",
        )
        for name in sorted(getattr(settings, "RATELIMITS", {}).keys() - DEFAULTS.keys())
    ]
