"""The app that bills what the app `ratelimits.usage` has counted."""

from __future__ import annotations

from collections.abc import Mapping

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _

from ratelimits.conf import conf
from ratelimits.usage.ledger.bills import bills


class BillingConfig(AppConfig):
    name = "ratelimits.billing"
    label = "ratelimits_billing"
    verbose_name = _("Rate limits: billing")
    #: The pages of the admin's index, in the order in which people use them.
    pages = ("Report", "ReportLine", "Adjustment", "PushReceiver", "PushDelivery")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Put the functions of this app in the places that the apps below leave for them."""
        from ratelimits.billing import as_code, status
        from ratelimits.billing.models.reports import chains, reported_until
        from ratelimits.billing.reports import adjusting
        from ratelimits.billing.reports.terms.plan_book import included_now
        from ratelimits.status import additions
        from ratelimits.usage import erasure

        bills.included = included_now
        bills.chains = chains
        bills.reported_until = reported_until
        bills.adjust = adjusting.adjust
        additions.register(status.ADDITIONS)
        erasure.PARTS.add("ratelimits.billing.erasing.BILLS")
        as_code.register()


def _intervals() -> Mapping[str, float]:
    intervals = {"ratelimits.finalise": conf.FINALISE_INTERVAL}
    if conf.PUSH:
        intervals["ratelimits.push"] = conf.PUSH_INTERVAL
    return intervals


# Not in `ready`: an app that is ready earlier can already ask for the schedule, and Celery asks only once.
bills.intervals = _intervals
