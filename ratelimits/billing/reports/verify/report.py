"""Verify reports: compute each one again from the ledger, and compare it line by line with the stored report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain as chained
from itertools import zip_longest
from math import inf
from operator import itemgetter

from django.db.models import Q

from ratelimits.billing.models import Report, ReportLine
from ratelimits.billing.reports import signing
from ratelimits.billing.reports.build import (
    CHUNK,
    Allowance,
    Group,
    between,
    grouped,
    of_customer,
    of_period,
    usage_line,
)
from ratelimits.billing.reports.limits import Limits
from ratelimits.billing.reports.rows import ADJUSTMENT, joined_line_id, line_id
from ratelimits.billing.reports.statements import version_rows
from ratelimits.billing.reports.terms import RuleBook
from ratelimits.billing.reports.verify.allowances import ReportAllowances
from ratelimits.billing.reports.verify.amounts import verify_amounts
from ratelimits.conf import conf
from ratelimits.models.accounts.named import of_tokens
from ratelimits.usage import signatures
from ratelimits.usage.models import ArchivedRange, Batch, ErasedDigest, erased
from ratelimits.usage.periods import SECOND, iso

#: Columns that are compared. The names of rules, plans and units are left out, and so are the limits: they can change
#: after the report was finalised.
_COMPARED = (
    "line_id",
    "usage_period",
    "meter",
    "key",
    "rule_id",
    "rule_version",
    "consumed_quantity",
    "refunded_quantity",
    "admitted_count",
    "denied_count",
    "included_quantity",
    "overage_quantity",
    "charge_period_start",
    "charge_period_end",
)
#: If a line was made from ledger lines, at least one of these columns is above 0.
_QUANTITIES = (
    *("admitted_count", "denied_count", "consumed_quantity", "refunded_quantity"),
    *("included_quantity", "overage_quantity"),
)
#: Maximum number of digits of a number that fits a database column (less than 2**63).
_MAX_DIGITS = 19


def verify_report(report: Report, *sources: str) -> Generator[str]:
    """Yield a sentence for each error in one version of a report."""
    yield from ReportVerifier(report._state.db or conf.DATABASE, *sources).findings(report)


class ReportVerifier:
    """Verifies many reports. It reads rules and the digests of the ledger's chains only once.

    `sources` are the aliases of the databases that contain the reports' ledger lines, by default `using`. `checked`
    counts the reports and their lines.
    """

    def __init__(self, using: str, *sources: str, checked: Counter[str] | None = None) -> None:
        self._using, self._sources = using, sources or (using,)
        self._checked = Counter() if checked is None else checked
        self._rules = RuleBook(using)
        self._limits = Limits(using, self._rules)
        self._customer = lru_cache(maxsize=1000)(lambda token: of_tokens(using, [token])[token])
        self._chain_head = lru_cache(maxsize=1000)(lambda chain: signing.chain_head(dict(chain), *self._sources))

    def findings(self, report: Report) -> Generator[str]:
        """Yield a sentence for each error in one version of a report.

        A caller that stops early must close this generator, because the generator keeps database cursors open.
        """
        self._checked["reports"] += 1
        try:
            for error in chained(self._digest(report), verify_amounts(self._using, report), self._usage(report)):
                yield f"report {report}: {error}"
        except (ValueError, OverflowError, TypeError) as error:
            yield f"report {report}: it contains values that closing never writes, so it cannot be verified: {error!r}"

    def _digest(self, report: Report) -> Iterator[str]:
        """Yield the errors in the digest, the number of lines, the signature, and the previous digest of a report."""
        digest, count = signing.Digest(report), 0
        for row in version_rows(report):
            digest.add(row)
            count += 1
        self._checked["report lines"] += count
        if not erased.is_of(self._using, digest.hexdigest(), report.digest):
            yield "its own columns or its lines do not match its digest"
        if count != report.line_count:
            yield f"it was finalised with {report.line_count} lines, but has {count}"
        if error := signatures.error_of(report.digest, report.signature):
            yield error
        digest_before, label = self._before(report)
        if report.previous_digest != digest_before:
            yield "its previous digest is not the digest of the version before it"
        elif report.label != label:
            yield f"it belongs to the month {report.label}, but the version before it belongs to {label}"

    def _before(self, report: Report) -> tuple[str | None, str]:
        """Return the digest and the month of the version before `report`.

        Before version 1, the digest is "". If the version is missing, the digest is None.
        """
        if report.version == 1:
            return "", report.label
        rows = Report.objects.using(self._using).filter(
            customer__token=report.customer_id, period_start=report.period_start
        )
        before = rows.filter(version=report.version - 1).values_list("digest", "label").first()
        return (None, "") if before is None else before

    def _usage(self, report: Report) -> Iterator[str]:
        """Compare the report with the ledger: first the digests of the chains, then the lines."""
        if not has_readable_positions(report):
            yield "the positions at which its usage starts and ends cannot be read"
            return
        try:
            if self._chain_head(tuple(report.chain.items())) != report.chain_head:
                yield "the digests of the ledger's chain are no longer those that the report recorded"
        except signing.BrokenChainError as error:
            yield str(error)
            return
        finding = next(self._lines(report), "")
        if finding:
            # Look for missing archives only now: perhaps usage was archived while the lines were read.
            archive = self._missing_archive(report)
            yield signing.archived_message(archive) if archive else finding

    def _missing_archive(self, report: Report) -> str:
        """Return the name of an archive whose batches have usage of the report, but are in none of the sources.

        Return "" if there is no such archive.
        """
        in_report = Q(pk__in=())  # Matches nothing. The loop adds a condition for each shard.
        for since in report.since.values():
            for shard, position in report.chain.items():
                in_report |= Q(shard=int(shard), last_position__gt=since.get(shard, 0), first_position__lte=position)
        for moved in ArchivedRange.objects.using(self._using).filter(in_report).order_by("pk"):
            batch = {"shard": moved.shard, "position": moved.last_position}
            if not any(Batch.objects.using(source).filter(**batch).exists() for source in self._sources):
                return moved.archive
        return ""

    def _lines(self, report: Report) -> Iterator[str]:
        """Yield the difference in the first line that has one, and none of later lines.

        The lines of a meter share one allowance. So one wrong line can make correct lines after it differ too.
        """
        finding = next(self._differences(report, ReportAllowances(self._using, report)), "")
        if not finding:
            return
        # An earlier version of this app calculated all lines with the allowance of the report's period. Lines that
        # match this calculation are not wrong.
        one_allowance = ReportAllowances(self._using, report, one_for_all=True)
        if not next(self._differences(report, one_allowance), ""):
            return
        # An earlier version also made another `line_id` if a key or a meter contains line feeds.
        if next(self._differences(report, ReportAllowances(self._using, report), joined_line_id), ""):
            yield finding

    def _differences(
        self, report: Report, report_allowances: ReportAllowances, make_id: Callable[..., str] = line_id
    ) -> Iterator[str]:
        """Compute the lines of a report, and yield the differences from its stored lines."""
        starts = sorted(int(period) * SECOND for period in report.since)
        unknown = [start for start in starts if start not in report_allowances.ends]
        if unknown:
            yield f"it has usage of the period from {iso(unknown[0])}, which has no report"
            return
        groups: Iterable[Group] = chained.from_iterable(
            self._groups(report, start, report_allowances.ends[start], report.since[str(start // SECOND)])
            for start in starts
        )
        if ErasedDigest.objects.using(self._using).filter(before=report.digest).exists():
            groups = self._as_stored(report, groups)
        # The number of a line is not compared, so each line gets the number 0.
        computed = (
            usage_line(report, 0, group, self._rules, report_allowances.allowances, make_id)
            for group in self._limits.of(groups, self._customer(report.customer_id))
        )
        # Except for adjustments, lines of all categories are compared, even of unknown categories: each line is billed.
        lines = ReportLine.objects.using(self._using).filter(report=report).exclude(charge_category=ADJUSTMENT)
        stored = (line for line in lines.order_by("number").iterator(chunk_size=CHUNK) if _has_quantity(line))
        for expected, line in zip_longest(computed, stored):
            if line is None:
                yield f"line {expected.line_id} ({expected.key}, {expected.meter}) is missing"
                return
            name = f"line {line.line_id} ({line.key}, {line.meter})"
            if expected is None:
                yield f"{name} has no usage in the ledger"
                return
            for column in _COMPARED:
                if getattr(line, column) != getattr(expected, column):
                    yield f"{name} has {column} {getattr(line, column)}, the ledger says {getattr(expected, column)}"
                    return
        yield from self._adjustment_differences(report, report_allowances.allowances[report.period_start])

    def _as_stored(self, report: Report, groups: Iterable[Group]) -> list[Group]:
        """Return the groups in the order of the stored lines. It was the order of the keys before they were erased."""
        columns = ("usage_period", "meter", "key", "rule_id", "rule_version")
        stored = ReportLine.objects.using(self._using).filter(report=report).exclude(charge_category=ADJUSTMENT)
        numbers = {tuple(subject): number for number, *subject in stored.values_list("number", *columns)}
        subject = itemgetter("period", "meter", "key", "rule", "version")
        return sorted(groups, key=lambda group: numbers.get(subject(group), inf))

    def _adjustment_differences(self, report: Report, allowance: Allowance) -> Iterator[str]:
        """Compare the included quantity and the overage of each adjustment with the numbers that the allowance gives.

        `allowance` is what is left of the period's allowance after the report's other lines.
        """
        lines = ReportLine.objects.using(self._using).filter(report=report, charge_category=ADJUSTMENT)
        for line in lines.order_by("number").iterator(chunk_size=CHUNK):
            included, overage = allowance.split(line.meter, line.consumed_quantity)
            if (line.included_quantity, line.overage_quantity) != (included, overage):
                yield (
                    f"line {line.line_id} (an adjustment of {line.meter}) has included_quantity"
                    f" {line.included_quantity} and overage_quantity {line.overage_quantity},"
                    f" but the lines before it give {included} and {overage}"
                )
                return

    def _groups(self, report: Report, start: int, end: int, since: Mapping[str, int]) -> Iterator[Group]:
        condition = of_customer(self._customer(report.customer_id), start, end) & between(since, report.chain)
        return of_period(grouped(condition, *self._sources), start)


def has_readable_positions(report: Report) -> bool:
    """Return whether the positions in a report have the form in which closing writes them."""
    try:
        positions = [report.chain, *report.since.values()]
        shards = [shard for by_shard in positions for shard in by_shard]
        values = [position for by_shard in positions for position in by_shard.values()]
        numbers = [*report.since, *shards]
        valid = all(number.isdecimal() and len(number) <= _MAX_DIGITS for number in numbers)
        return valid and all(map(_is_position, values))
    except (AttributeError, TypeError):
        return False


def _is_position(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _has_quantity(line: ReportLine) -> bool:
    """Return whether a line was made from ledger lines. Lines for lost replies or gaps have no quantities."""
    return any(getattr(line, name) for name in _QUANTITIES)
