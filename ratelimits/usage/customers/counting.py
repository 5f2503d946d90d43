"""Count the usage of a text again, by the customers whom it names now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db.models import Max, Min

from ratelimits.models import Customer
from ratelimits.usage.ledger.bills import bills
from ratelimits.usage.ledger.tally import SUBJECT, SUMS, TOTAL, sums_by_period
from ratelimits.usage.models import Line, PeriodUsage
from ratelimits.usage.models.sums import MAX_TOTAL, ExactSum


def count_again(using: str, text: str, since: int, tallied: Mapping[int, int]) -> bool:
    """Count the usage of a text again by the customers whom it names now, in all periods that end after `since`.

    Each customer has billing periods of its own. So the usage from `since` on perhaps goes to periods that have another
    start. `since` is in s since 1970 UTC. `tallied` has the position up to which each shard is tallied. The rows of
    these shards must be locked, and no report may contain the usage. Return whether there was usage at `since` or
    later.
    """
    totals = PeriodUsage.objects.using(using).filter(account=text, period_end__gt=since)
    lines = Line.objects.using(using).filter(account=text)
    shards = list(totals.order_by().values_list("shard", flat=True).distinct())
    if not shards or not lines.filter(bin__gte=since, batch__shard__in=shards).exists():
        return False
    lines = lines.filter(bin__gte=totals.aggregate(first=Min("period"))["first"]).values_list(*SUBJECT).order_by()
    added = []
    for shard in sorted(shards):
        counted = lines.filter(batch__shard=shard, batch__position__lte=tallied[shard])
        # Before `since`, the customers and their periods are the same as before.
        rows: list[Any] = list(counted.annotate(*map(ExactSum, SUMS)))
        sums = sums_by_period(using, rows, since)
        added += [(shard, subject, counts) for subject, counts in sorted(sums.items())]
    totals._raw_delete(using)
    PeriodUsage.objects.using(using).bulk_create(
        PeriodUsage(
            **dict(zip(TOTAL, subject, strict=True)),
            **{name: min(total, MAX_TOTAL) for name, total in zip(SUMS, counts, strict=True)},
            shard=shard,
            position=tallied[shard],
        )
        for shard, subject, counts in added
    )
    return True


def closed_until(using: str, text: str, customer: Customer | None = None) -> int:
    """Return the end (s since 1970 UTC) of the newest reported period with usage of a text; 0 without one.

    With a customer, also of its newest report: whoever gets the text gets no usage in a period with a report, since the
    report states all usage up to its positions in the ledger.
    """
    totals = PeriodUsage.objects.using(using).filter(account=text).exclude(covered=None)
    end: int = totals.aggregate(newest=Max("period_end"))["newest"] or 0
    if customer is not None:
        end = max(end, bills.reported_until(using, customer) or 0)
    return end
