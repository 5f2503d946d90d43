"""Say which files of earlier months have gained reports, for the commands that write a month's file or manifest."""

from __future__ import annotations

from collections.abc import Iterator

from ratelimits.billing.reports.statements.gained import gains
from ratelimits.conf import conf
from ratelimits.management.plurals import plural


def gain_sentences(month: str, what: str, account: str | None = None) -> Iterator[str]:
    """Yield a sentence for each earlier month that has gained reports since `month` began.

    `what` is the thing to take again, such as "file". If `account` is given, look only at the reports of its customer.
    """
    for gain in gains(conf.DATABASE, month, account):
        counted = [(gain.corrections, "correction"), (gain.late_first_reports, "late first report")]
        counts = " and ".join(plural(count, name) for count, name in counted if count)
        yield (
            f"Since {month} began (UTC), {gain.month} has gained {counts}, the newest at"
            f" {gain.newest:%Y-%m-%d %H:%M:%S} UTC: write the {what} of {gain.month} again if yours is older."
        )
