"""Compare what the app says after a history of months (months.py) with what the model says."""

from __future__ import annotations

import csv
import io
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import chain, pairwise
from typing import Any

from django.db.models import Sum

from ratelimits.billing.models import Report, ReportLine
from ratelimits.billing.reports.exports import FORMATS
from ratelimits.billing.reports.rows import FINAL
from ratelimits.billing.reports.statements import statements
from ratelimits.billing.reports.statements.charges import lines_for
from ratelimits.billing.reports.verify.report import ReportVerifier
from ratelimits.billing.reports.verify.terms import verify_terms
from ratelimits.billing.reports.verify.totals import verify_totals
from ratelimits.models import FrozenPeriod, Name
from ratelimits.models.accounts.named import named_now
from ratelimits.models.periods import timelines_of
from ratelimits.usage.customers.counting import count_again
from ratelimits.usage.models import PeriodUsage, ShardState
from tests.reference.amounts import SECOND
from tests.reference.customers import LARGEST, Bill, Span
from tests.reference.periods import DAY
from tests.support.reports.months import FIRST, History

#: A bill: the number of its customer in the model, and the start (µs) of its period.
Subject = tuple[int, int]


class Comparison:
    """What the app and the model say after a history. `counts` says how much was compared."""

    def __init__(self, history: History) -> None:
        self.history, self.books = history, history.books
        self.counts: Counter[str] = Counter()
        self.bills = {(customer, span[0]): (span, bill) for (customer, span), bill in self.books.bills().items()}
        #: The model's customer of each customer of the app, by primary key and by token.
        self.of_pk: dict[int, int] = {}
        self.of_token: dict[str, int] = {}

    def differences(self) -> Iterator[str]:
        yield from self.history.found
        yield from self.names()
        yield from self.periods()
        yield from self.totals("the total of")
        yield from self.reports()
        yield from self.units()
        yield from self.amounts()
        yield from self.files()
        yield from self.verified()
        tallied = dict(ShardState.objects.values_list("shard", "tallied"))
        for text in self.books.names:
            count_again("default", text, 0, tallied)
        yield from self.totals("counted again, the total of")

    def names(self) -> Iterator[str]:
        """Compare whom each text names when, and that an answer about a text is about its present customer alone."""
        rows: dict[str, list[tuple[int, int, int | None]]] = defaultdict(list)
        tokens: dict[int, str] = {}
        columns = ("identifier", "customer", "since", "until", "customer__token")
        for text, pk, since, until, token in Name.objects.order_by("since").values_list(*columns):
            rows[text].append((since, pk, until))
            tokens[pk] = token
        self.of_pk = {pk: customer for customer, pk in self.history.pks.items()}
        for text, names in self.books.names.items():
            if text not in rows and not self.books.uses.get(text):
                continue  # The app makes a customer when it needs one.
            self.counts["texts"] += 1
            starts = [since for since, _pk, _until in rows[text]]
            if [until for _since, _pk, until in rows[text]] != [*starts[1:], None]:
                yield f"the names of {text} do not follow each other: {rows[text]}"
            if [since * SECOND for since in starts] != [since for since, _customer in names]:
                yield f"{text} changes its customer at {starts}, and not at {names}"
                continue
            for (_since, pk, _until), (_from, customer) in zip(rows[text], names, strict=True):
                if self.of_pk.setdefault(pk, customer) != customer:
                    yield f"{text} names customer {pk} of the app, and {customer} of the model"
        if len(set(self.of_pk.values())) != len(self.of_pk):
            yield f"two customers of the app are one: {self.of_pk}"
        self.of_token = {token: self.of_pk[pk] for pk, token in tokens.items() if pk in self.of_pk}
        for text in rows.keys() & self.books.names.keys():
            present = self.books.now(text)
            own = {
                (other, since // SECOND, None if until is None else until // SECOND)
                for other, names in self.books.names.items()
                for (since, customer), until in zip(names, [*(at for at, _c in names[1:]), None], strict=True)
                if customer == present and other in rows
            }
            seen = named_now("default", [text])[text].names
            if set(map(tuple, seen)) != own:
                yield f"people see {seen} under {text}, and not {own}"

    def periods(self) -> Iterator[str]:
        """Compare the frozen periods. Each quarter of an hour is in one period, and neighbours touch."""
        rows: dict[int, dict[Span, tuple[str, str]]] = defaultdict(dict)
        for pk, start, end, zone, label in FrozenPeriod.objects.values_list(
            "customer", "start", "end", "timezone", "label"
        ):
            rows[self.of_pk.get(pk, -1)][start, end] = zone, label
        for customer, about in enumerate(self.books.customers):
            self.counts["frozen periods"] += len(rows[customer])
            if rows[customer] != about.periods.frozen:
                yield f"customer {customer} has the frozen periods {rows[customer]}, and not {about.periods.frozen}"
        first = int(FIRST.timestamp()) * SECOND - 60 * DAY
        last = self.history.now
        texts = [text for text in self.books.names if text in self._known_texts()]
        customers = named_now("default", texts)
        timelines = timelines_of("default", customers.values())
        for text, one in customers.items():
            timeline = timelines[one.token]
            periods = timeline.between(first, last)
            model = self.books.customers[self.books.now(text)].periods
            if not all(one.end == other.start for one, other in pairwise(periods)):
                yield f"the periods of {text} do not touch: {periods}"
            for period in periods:
                self.counts["periods"] += 1
                for at in (period.start, (period.start + period.end) // 2, period.end - 1):
                    if timeline.at(at) != period or model.period(at) != (period.start, period.end):
                        yield f"{text} at {at}: {timeline.at(at)} and {period}, and not {model.period(at)}"

    def _known_texts(self) -> set[str]:
        return set(Name.objects.values_list("identifier", flat=True))

    def totals(self, what: str) -> Iterator[str]:
        """Compare the totals of each customer, text, period and meter."""
        expected: Counter[tuple[int, str, int, str]] = Counter()
        for uses in self.books.uses.values():
            for use in uses:
                customer, span = self.books.span_of(use)
                key = customer, use.text, span[0], use.meter
                expected[key] = min(expected[key] + use.units, LARGEST)
        columns = ("customer", "account", "period", "meter")
        sums = PeriodUsage.objects.values_list(*columns).order_by().annotate(Sum("admitted_units"))
        found = {(self.of_pk.get(pk, -1), text, at * SECOND, meter): units for pk, text, at, meter, units in sums}
        yield from different(what, found, expected)

    def reports(self) -> Iterator[str]:
        """Compare which periods have reports."""
        found: dict[Subject, tuple[Any, ...]] = {}
        first = Report.objects.filter(version=1).order_by("pk")
        columns = ("customer", "period_start", "period_end", "timezone", "label")
        for token, start, *about in first.values_list(*columns):
            self.counts["reports"] += 1
            subject = self.of_token.get(token, -1), start
            if subject in found:
                yield f"{subject} has two reports: {found[subject]} and {about}"
            found[subject] = tuple(about)
        expected = {
            subject: (span[1], *self.books.customers[subject[0]].periods.frozen[span])
            for subject, (span, _bill) in self.bills.items()
        }
        self.counts["full periods"] = sum(bill.is_full for _span, bill in self.bills.values())
        yield from different("the report of", found, expected, self.is_closed)

    def units(self) -> Iterator[str]:
        """Compare the units on reports, by the period of the usage."""
        units: dict[str, Counter[tuple[Subject, str]]] = {name: Counter() for name in _QUANTITIES}
        columns = ("report__customer", "usage_period", "meter", *_QUANTITIES.values())
        for token, start, meter, *counts in ReportLine.objects.exclude(meter="").values_list(*columns):
            for name, count in zip(_QUANTITIES, counts, strict=True):
                units[name][(self.of_token.get(token, -1), start * SECOND), meter] += count
        for name, of_name in units.items():
            wanted = {
                (subject, meter): count
                for subject, (_span, bill) in self.bills.items()
                for meter, count in getattr(bill, name).items()
            }
            yield from different(f"{name} units of", of_name, wanted, self.is_closed)

    def is_closed(self, key: Any) -> bool:
        """Return whether a period has not too much usage for a report. `key` is a subject, or it begins with one."""
        subject = key[0] if isinstance(key[0], tuple) else key
        return subject not in self.bills or not self.bills[subject][1].is_full

    def amounts(self) -> Iterator[str]:
        """Compare the sum of the versions' amounts with the price of the final state."""
        found: dict[Subject, Fraction] = {}
        for token, amounts in Report.objects.order_by("pk").values_list("customer", "amounts"):
            for start, period in amounts.get("periods", {}).items():
                subject = self.of_token.get(str(token), -1), int(start) * SECOND
                found[subject] = found.get(subject, Fraction(0)) + Fraction(period["amount"])
        expected = {subject: bill.amount for subject, (_span, bill) in self.bills.items() if bill.amount is not None}
        self.counts["amounts"] += sum(map(self.is_closed, expected))
        yield from different("the amount of", found, expected, self.is_closed)

    def files(self) -> Iterator[str]:
        """Compare the months' files: each report is in one, from its first version on, with all its lines."""
        for difference in self.history.files.differences(self._came_late):
            # By the time zone data of today, the last moment of a period can be in another month.
            if not (self.history.disturbed and " belongs to " in difference):
                yield difference
        consumed: Counter[int] = Counter()
        owed: defaultdict[int, Fraction] = defaultdict(Fraction)
        totals: defaultdict[int, dict[tuple[str, str], Fraction]] = defaultdict(dict)
        form = FORMATS["csv-amounts"]
        for month in self.history.files.taken:
            self.counts["files"] += 1
            written = b"".join(form.stream(lines_for(form, statements(month)))).decode()
            for row in csv.DictReader(io.StringIO(written)):
                if row["status"] != FINAL:
                    continue  # a period with too much usage
                customer = self.of_token.get(row["report_id"].partition(".")[0], -1)
                consumed[customer] += int(row["consumed_quantity"])
                owed[customer] += Fraction(row["amount"] or 0)
                # Late usage of a period with a plan in another currency has a total of its own.
                totals[customer][row["report_id"], row["currency"]] = Fraction(row["report_total"] or 0)
        wanted: Counter[int] = Counter()
        due: dict[int, Fraction] = defaultdict(Fraction)
        for (customer, _start), (_span, bill) in self.bills.items():
            wanted[customer] += sum(bill.consumed.values())
            due[customer] += bill.amount or 0
        full = {customer for (customer, _start), (_span, bill) in self.bills.items() if bill.is_full}

        def compared(customer: int) -> bool:
            return customer not in full

        yield from different("all files' units of customer", consumed, wanted, compared)
        yield from different("all files' amounts of customer", owed, due, compared)
        total = {customer: sum(by_report.values()) for customer, by_report in totals.items()}
        yield from different("the totals of all files of customer", total, owed, compared)

    def _came_late(self, report: Report) -> bool:
        """Return whether everything on a report came after the file of its month was taken."""
        subject = self.of_token.get(report.customer_id, -1), report.period_start
        _span, bill = self.bills.get(subject, (None, Bill()))
        return bill.arrived > self.history.taken_at.get(report.label, 0)

    def verified(self) -> Iterator[str]:
        verifier = ReportVerifier("default")
        reports = Report.objects.order_by("pk")[:: 1 + len(self.books.customers) // 8]
        findings = chain.from_iterable(map(verifier.findings, reports))
        yield from (each for each in chain(findings, verify_totals("default")) if " is full" not in each)
        if not self.history.disturbed:
            yield from verify_terms("default", Counter())


#: The fields of a bill of the model, and the columns of a report's line.
_QUANTITIES = {
    "consumed": "consumed_quantity",
    "refunded": "refunded_quantity",
    "included": "included_quantity",
    "overage": "overage_quantity",
}


def different(what: str, found: Any, expected: Any, compared: Callable[[Any], bool] | None = None) -> Iterator[str]:
    """Yield what differs between two dicts. Without a value, an entry is 0."""
    for key in sorted(found.keys() | expected.keys()):
        one, other = found.get(key, 0), expected.get(key, 0)
        if one != other and (compared is None or compared(key)):
            yield f"{what} {key} is {one}, and not {other}"
