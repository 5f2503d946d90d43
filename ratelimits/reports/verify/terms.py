"""Verifying what reports were billed by: their bounds and what they include, beside the history of accounts' terms.

A report records its bounds, its plan and what that includes. The configuration's history says the same, where it goes
back that far: rows that were written past the app have none from before they were adopted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, islice
from typing import Any

from django.db.models import Sum

from ratelimits.algorithms.calendar import boundaries
from ratelimits.models import Account, KeptPeriod, PeriodUsage, Plan, PlanPrice, Report, ReportLine
from ratelimits.models.keys import key_shard
from ratelimits.models.raw.adoption import ADOPTED, never_recorded
from ratelimits.reports.included import Included, IncludedBook
from ratelimits.reports.periods import SECOND, iso
from ratelimits.reports.terms import AccountTerms
from ratelimits.reports.terms.price_book import PriceBook

_CHUNK = 500
_MONTHS_OF_NONE = ("UTC", "")


def verify_terms(using: str, checked: Counter[str]) -> Iterator[str]:
    """Say which reports have bounds, or prices, or include a quantity, that their accounts' terms never made.

    `checked` is given the number of reports whose terms the history knows.
    """
    book = PriceBook(using)
    first = Report.objects.using(using).filter(version=1).order_by("period_start", "period_end", "account")
    for (start, end), found in groupby(first.iterator(_CHUNK), key=lambda each: (each.period_start, each.period_end)):
        while reports := list(islice(found, _CHUNK)):
            months = _months(using, {report.account for report in reports})
            yield from _verify_bounds(reports, months, checked)
            terms = AccountTerms(using, {report.account for report in reports})
            yield from _verify_included(using, reports, terms, start, end)
            yield from _verify_prices(using, reports, IncludedBook(terms), start, end, book)
    yield from _verify_kept(using)


@dataclass(slots=True)
class _Months:
    """The time zones and anchors of some account rows ever, as far back as is known (µs)."""

    found: set[tuple[str, str]]
    since: int

    def start(self, at: int) -> bool:
        """Return whether a month of any of them starts at a moment."""
        return any(_starts(*each, at) for each in (*self.found, _MONTHS_OF_NONE))


def _months(using: str, names: Collection[str]) -> dict[str, _Months]:
    """Return the months of these accounts' names, and of the names that handed their periods on to them."""
    related = _related(using, names)
    months = {names: _Months(set(), 0) for names in related.values()}
    history: Any = Account.history
    columns = ("id", "identifier", "timezone", "billing_anchor", "history_type", "history_change_reason", "since")
    records = history.using(using).filter(identifier__in=related)
    records = records.order_by("id", "version", "history_id").values_list(*columns)
    known = set()
    for pk, states in groupby(records, key=lambda row: row[0]):
        first, *others = states
        _pk, name, *_terms, kind, reason, since = first
        known.add(pk)
        mine = months[related[name]]
        mine.found |= {(state[2], state[3]) for state in (first, *others)}
        # Nobody knows what a row was before, if its first record did not make it.
        if kind != "+" or reason in ADOPTED:
            mine.since = max(mine.since, since)
    for account in Account.objects.using(using).filter(identifier__in=related).exclude(pk__in=known):
        months[related[account.identifier]].since = 2**63
    return {name: months[related[name]] for name in names}


def _related(using: str, names: Collection[str]) -> dict[str, frozenset[str]]:
    """Return all names that one of these is related to, by name: a row had both, or had one and a related one.

    A new name goes on with the billing period of the former one, whichever row that had it from.
    """
    history: Any = Account.history
    groups = {name: frozenset({name}) for name in names}
    rows: set[int] = set()
    added = set(names)
    while added:
        rows |= (new := set(history.using(using).filter(identifier__in=added).values_list("id", flat=True)) - rows)
        pairs = history.using(using).filter(id__in=new).order_by("id").values_list("id", "identifier").distinct()
        added = set()
        for _pk, those in groupby(pairs, key=lambda pair: pair[0]):
            together = {name for _id, name in those}
            added |= together - groups.keys()
            joined = together.union(*(groups.get(name, ()) for name in together))
            groups |= dict.fromkeys(joined, frozenset(joined))
    return groups


@lru_cache(maxsize=16_384)
def _starts(timezone: str, anchor: str, at: int) -> bool:
    try:
        return boundaries("month", timezone, anchor or None, at)[1] == at
    except (ValueError, OverflowError):
        return False


def _verify_bounds(reports: list[Report], months: Mapping[str, _Months], checked: Counter[str]) -> Iterator[str]:
    for report in reports:
        mine = months[report.account]
        if report.period_start < mine.since:
            continue
        checked["bounds of reports"] += 1
        for what, at in (("starts", report.period_start), ("ends", report.period_end)):
            if not mine.start(at):
                yield (
                    f"report {report} {what} at {_when(at)}: by no terms that its account ever had does a month start"
                    " then"
                )


def _verify_included(using: str, reports: list[Report], terms: AccountTerms, start: int, end: int) -> Iterator[str]:
    for report in reports:
        ways = _ways(terms, report.account, start, end)
        if any(_is(using, report, each, start, end) for each in ways):
            continue
        said = IncludedBook(terms).of(report.account, start, end)
        if _is_known(using, report, said, end):
            yield (
                f"report {report} includes {_shown(report.plan, report.included)}, and its account's terms say"
                f" {_shown(said.plan, said.included)}"
            )


def _ways(terms: AccountTerms, name: str, start: int, end: int) -> Iterator[Included]:
    """Yield what was included by the setting of today, and by others: a report does not say which it was made with."""
    for proration in (None, "none", "time"):
        yield IncludedBook(terms).of(name, start, end, proration)
    # As before there were rules for whose terms change in mid-period.
    plain = terms.at(name, end - 1)
    yield Included(plain.plan, plain.included)


def _is(using: str, report: Report, terms: Included, start: int, end: int) -> bool:
    if report.plan != terms.plan:
        return False
    taken: Counter[str] = Counter()
    if terms.shared:
        lines = ReportLine.objects.using(using).filter(report__account__in=terms.shared, report__lt=report.pk)
        lines = lines.filter(usage_period__gte=start // SECOND, usage_period__lt=end // SECOND)
        taken.update(dict(lines.values_list("meter").order_by().annotate(Sum("included_quantity"))))
    included: Any = {meter: quantity - taken[meter] for meter, quantity in terms.included.items()}
    return bool(report.included == included)


def _is_known(using: str, report: Report, terms: Included, end: int) -> bool:
    """Return whether the history knew of the account, and of the plans, when the period ended."""
    accounts: Any = Account.history
    mine = accounts.using(using).filter(identifier=report.account)
    rows = Account.objects.using(using).filter(identifier=report.account)
    if not mine.filter(since__lt=end).exists() and (mine.exists() or rows.exists()):
        return False
    plans: Any = Plan.history
    for slug in {report.plan, terms.plan} - {""}:
        records = plans.using(using).filter(slug=slug)
        known = records.filter(since__lt=end).exists()
        if not known and (records.exists() or Plan.objects.using(using).filter(slug=slug).exists()):
            return False
    return True


def _verify_prices(
    using: str, reports: list[Report], terms: IncludedBook, start: int, end: int, book: PriceBook
) -> Iterator[str]:
    """Compare the prices that reports recorded of their own periods with those that the plan had at their ends."""
    for report in reports:
        included = terms.of(report.account, start, end)
        if included.names:
            continue  # the prices are those that the first of the account's names was billed with
        expected = book.of(*included.priced)
        said = report.prices.get("periods", {}).get(str(report.period_start // SECOND), {})
        if said != expected and _are_priced_in_history(using, report):
            priced, due = (", ".join(each.get("meters", ())) or "nothing" for each in (said, expected))
            yield (
                f"report {report} has prices of {priced}, not those that the plan {report.plan!r} had when the period"
                f" ended, of {due}"
            )


def _are_priced_in_history(using: str, report: Report) -> bool:
    """Return whether the history has all that the plan's prices were when the period ended."""
    if not _is_known(using, report, Included(report.plan, {}), report.period_end):
        return False
    plans: Any = Plan.history
    ids = set(plans.using(using).filter(slug=report.plan).values_list("id", flat=True))
    records: Any = PlanPrice.history
    adopted = records.using(using).filter(history_type="+", history_change_reason__in=ADOPTED)
    late = adopted.filter(plan_id__in=ids, since__gte=report.period_end)
    return not late.exists() and not never_recorded(PlanPrice, using).filter(plan__in=ids).exists()


def _shown(plan: str, included: Any) -> str:
    return f"{included} of {plan!r}" if plan or included else "nothing"


def _verify_kept(using: str) -> Iterator[str]:
    """Name the kept periods that nothing was counted under."""
    for row in KeptPeriod.objects.using(using).order_by("account").iterator(_CHUNK):
        names = _related(using, {row.account})[row.account]
        usage = PeriodUsage.objects.using(using).filter(account__in=names, period=row.start // SECOND)
        ends = set(usage.values_list("period_end", flat=True).distinct())
        used = row.start % SECOND == row.end % SECOND == 0 and ends & {None, row.end // SECOND}
        if not used or row.shard != key_shard(f"account:{row.account}"):
            yield (
                f"the kept billing period of {row.account}, {_when(row.start)} to {_when(row.end)}, is not one that it"
                " had used when its terms changed"
            )


def _when(at: int) -> str:
    try:
        return iso(at)
    except OverflowError:
        return f"{at} µs"
