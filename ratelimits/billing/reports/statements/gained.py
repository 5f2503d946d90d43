"""Find the earlier months whose files have gained reports. So whoever takes one file a month hears of corrections."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Count, Max, Q

from ratelimits.billing.models import Report
from ratelimits.models.accounts.named import named_now
from ratelimits.moments import moment
from ratelimits.usage.periods import month_in

#: A first report is late if it was made later than this after the end of its month in UTC. Usually, periods are closed
#: within some hours after the month has ended in all time zones.
_ON_TIME = timedelta(days=3)


@dataclass(frozen=True, slots=True)
class Gain:
    """What the file of a month has gained since a later month began.

    corrections         versions of reports that correct an earlier version
    late_first_reports  first versions that were made more than three days after the end of the month
    newest              when the newest of these reports was made
    """

    month: str
    corrections: int
    late_first_reports: int
    newest: datetime


def gains(using: str, month: str, account: str | None = None) -> Iterator[Gain]:
    """Yield what the files of earlier months have gained since a month like "2026-12" began (in UTC), in their order.

    If `account` is given, look only at the reports of its customer. Raise ValueError if `month` is not a month.
    """
    began = moment(month_in(month, "UTC")[0])
    year, number = map(int, month.split("-"))
    month_before = f"{year:04}-{number - 1:02}" if number > 1 else f"{year - 1:04}-12"
    is_first = Q(version=1)
    on_time = is_first & Q(label=month_before, finalised_at__lte=began + _ON_TIME)
    reports = Report.objects.using(using).filter(~on_time, label__lt=month, finalised_at__gte=began)
    if account is not None:
        reports = reports.filter(customer__token=named_now(using, [account])[account].token)
    rows: Any = reports.order_by("label").values_list("label")
    rows = rows.annotate(
        corrections=Count("pk", filter=~is_first), late=Count("pk", filter=is_first), newest=Max("finalised_at")
    )
    yield from (Gain(*row) for row in rows)
