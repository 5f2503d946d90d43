"""Find requests that are perhaps missing, of accounts that no report states because nothing of them was counted.

A report prints the gaps of its account. An account of which the ledger has no usage has no report, so nothing would
print its gaps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from django.db.models import Exists, OuterRef, Q

from ratelimits.models.accounts.named import named_now
from ratelimits.usage.ledger.process_totals import GAPS, LeastRequests, least_requests
from ratelimits.usage.models import GapKind, PeriodUsage, ProcessTotal
from ratelimits.usage.periods import SECOND, in_spans, month_in

#: The kinds of totals whose requests are perhaps used, but not billed.
_KINDS = ("unmetered", "unanswered", "unreported")
#: Maximum number of accounts that are named.
_MAX_NAMED = 5

#: What happened to the requests, by kind of gap.
_WORDS = {
    GapKind.UNMETERED: "were admitted unmetered",
    GapKind.UNKNOWN: "got no reply from Redis",
    GapKind.UNREPORTED: "were perhaps not counted, because a process ended",
}


@dataclass(frozen=True, slots=True)
class Unstated:
    """Requests of one kind in a month, of accounts without any usage in the ledger at that time."""

    kind: GapKind
    requests: LeastRequests
    #: The number of accounts, and the names of the first of them. "" is usage without an account.
    accounts: int
    names: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """Return the sentence that commands print."""
        names = ", ".join(name or "anonymous" for name in self.names)
        if self.accounts > len(self.names):
            names += ", and others"
        accounts = f"{self.accounts:,} {'account' if self.accounts == 1 else 'accounts'}"
        what = _WORDS[self.kind]
        return f"{self.requests.text.capitalize()} of {accounts} {what}, and no report states these accounts: {names}."


def unstated(using: str, month: str, account: str | None = None) -> Iterator[Unstated]:
    """Yield what no report of a month (UTC) states, for each kind. If `account` is given, look only at its customer.

    Raise ValueError if `month` is not a month.
    """
    start, end = month_in(month, "UTC")
    # A report states the requests under all texts of its customer.
    counted = PeriodUsage.objects.using(using).filter(
        Q(customer__names__until=None) | Q(customer__names__until__gt=OuterRef("bin")),
        customer__names__identifier=OuterRef("account"),
        customer__names__since__lte=OuterRef("bin"),
        period__lte=OuterRef("bin"),
        period_end__gt=OuterRef("bin"),
    )
    rows = ProcessTotal.objects.using(using).filter(~Exists(counted), bin__gte=start // SECOND, bin__lt=end // SECOND)
    if account is not None:
        rows = rows.filter(in_spans(named_now(using, [account])[account].spans(start, end)))
    for kind in _KINDS:
        of_kind = rows.filter(kind=kind)
        accounts = of_kind.order_by("account").values_list("account", flat=True).distinct()
        if names := tuple(accounts[:_MAX_NAMED]):
            yield Unstated(GAPS[kind], least_requests(of_kind), accounts.count(), names)
