from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class RatelimitsConfig(AppConfig):
    name = "ratelimits"
    verbose_name = _("Rate limits and usage")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from ratelimits import checks, witness  # noqa: F401  (registers the system checks)
        from ratelimits.usage import totals

        witness.write_with(totals.write)
