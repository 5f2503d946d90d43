"""The app that counts usage: from now on, Redis counts requests, and this process too."""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class UsageConfig(AppConfig):
    name = "ratelimits.usage"
    label = "ratelimits_usage"
    verbose_name = _("Rate limits: usage")
    #: The pages of the admin's index, in the order in which people use them.
    pages = (
        *("Shadow", "QuarantinedBatch", "DurabilityGap", "Alert", "AlertDelivery", "AlertChannel"),
        *("PeriodUsage", "Line", "Batch", "ShardState", "ArchivedRange"),
    )
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Put the functions of this app in the places that the app `ratelimits` leaves for them."""
        from ratelimits import rules, telemetry
        from ratelimits.quota.counting import counting
        from ratelimits.status import additions
        from ratelimits.usage import (
            checks,  # noqa: F401  (the system checks)
            doctor,
            recording,
        )
        from ratelimits.usage.counting import access, from_ledger, process_totals
        from ratelimits.usage.ledger import process_totals as stored_totals
        from ratelimits.usage.status import facts, readings

        counting.counts = True
        counting.admitted = process_totals.admitted
        counting.add = process_totals.add
        counting.by_row = access.count
        counting.refusals = access.take
        counting.restore = from_ledger.restore
        counting.arestore = from_ledger.arestore
        counting.record = recording.record
        counting.forget = access.clear
        process_totals.write_with(stored_totals.write)
        if readings.read not in telemetry.sources:
            telemetry.sources.append(readings.read)
        additions.register(facts.ADDITIONS)
        doctor.install()
        # An app that was ready earlier can have asked for a decision. Its prepared commands count and restore nothing.
        rules.forget()
