"""Let every request pass."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.test.utils import TestContextDecorator, override_settings


class no_rate_limits(TestContextDecorator):  # noqa: N801  (it is used as a decorator)
    """Let every request pass, and count nothing: the setting ENABLED is False."""

    def __init__(self) -> None:
        super().__init__()
        self._changes: list[override_settings] = []

    def enable(self) -> None:
        project_settings: dict[str, Any] = getattr(settings, "RATELIMITS", {})
        change = override_settings(RATELIMITS={**project_settings, "ENABLED": False})
        change.enable()
        self._changes.append(change)

    def disable(self) -> None:
        self._changes.pop().disable()
