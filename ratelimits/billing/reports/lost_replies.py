"""Find how many replies of Redis were lost.

Processes count lost replies, because perhaps the ledger does not have the requests whose replies were lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from django.db.models import Sum

from ratelimits.models.accounts.named import NamedCustomer
from ratelimits.usage.models import ProcessTotal
from ratelimits.usage.periods import SECOND

#: A key, such as "user:42", and the name of a meter.
KeyAndMeter = tuple[str, str]


class LostReplies:
    """Counts the replies that were lost between two moments (µs since 1970 UTC).

    The counts are read once, for these account texts, or for all if `texts` is None.
    """

    def __init__(self, using: str, start: int, end: int, texts: Collection[str] | None = None) -> None:
        first, end_rounded_up = start // SECOND, -(-end // SECOND)
        rows = ProcessTotal.objects.using(using).filter(kind="unanswered", bin__gte=first, bin__lt=end_rounded_up)
        if texts is not None:
            rows = rows.filter(account__in=texts)
        #: For each text, a list of (bin in s since 1970 UTC, key, meter, number of lost replies).
        self._rows: dict[str, list[tuple[int, str, str, int]]] = {}
        sums = rows.values_list("account", "bin", "key", "meter").order_by().annotate(Sum("requests"))
        for name, *rest in sums.iterator():
            self._rows.setdefault(name, []).append(tuple(rest))

    def of(self, customer: NamedCustomer, start: int, end: int) -> Counter[KeyAndMeter]:
        """Return how many replies of a customer were lost in a billing period, by key and meter."""
        counts: Counter[KeyAndMeter] = Counter()
        for span in customer.spans(start, end):
            for bin_, key, meter, requests in self._rows.get(span.text, ()):
                if span.start <= bin_ * SECOND < span.end:
                    counts[key, meter] += requests
        return counts
