"""Verifying a report: it is made again from the ledger, and compared line by line with what was finalised."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from itertools import chain as chained
from itertools import zip_longest

from django.db.models import Q, Sum

from ratelimits import signatures
from ratelimits.conf import conf
from ratelimits.models import Report, ReportLine
from ratelimits.reports import signing
from ratelimits.reports.build import CHUNK, Allowance, Group, between, grouped, usage_line
from ratelimits.reports.limits import Limits
from ratelimits.reports.rows import USAGE
from ratelimits.reports.statements import version_rows
from ratelimits.reports.terms import RuleBook

#: What must be the same when a line is made again. Names and limits are as they were known when it was finalised.
_MADE_AGAIN = (
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


def verify_report(report: Report, *sources: str) -> Generator[str]:
    """What does not hold of one version of a report, one sentence for each finding; nothing if all holds.

    Cursors are open between findings: whoever stops before the end closes it.

    `sources` are the databases that its ledger lines are in, by default the one that it is in itself.
    """
    using = report._state.db or conf.DATABASE
    places = sources or (using,)
    yield from _verify_digest(using, report)
    try:
        if signing.chain_head(report.chain, *places) != report.chain_head:
            yield f"report {report}: the ledger's chain no longer has the head that the report was made with"
    except signing.BrokenChainError as error:
        yield f"report {report}: {error}"
        return
    yield from _verify_lines(using, report, places)


def _verify_digest(using: str, report: Report) -> Iterator[str]:
    digest, count = signing.Digest(report), 0
    for row in version_rows(report):
        digest.add(row)
        count += 1
    if digest.hexdigest() != report.digest:
        yield f"report {report}: its head or its lines are not those that its digest was made of"
    if count != report.line_count:
        yield f"report {report}: it was finalised with {report.line_count} lines and has {count}"
    if not signatures.holds(report.digest, report.signature):
        yield f"report {report}: its signature is not the one of SIGNING_KEY, nor of one of SIGNING_KEYS_OLD"
    rows = Report.objects.using(using).filter(account=report.account, period_start=report.period_start)
    before = rows.filter(version=report.version - 1).values_list("digest", flat=True).first() or ""
    if report.previous_digest != before:
        yield f"report {report}: it does not follow on the digest of the version before"


def _stored(using: str, report: Report) -> Iterator[ReportLine]:
    lines = ReportLine.objects.using(using).filter(report=report).order_by("number")
    return lines.iterator(chunk_size=CHUNK)


def _verify_lines(using: str, report: Report, places: tuple[str, ...]) -> Iterator[str]:
    """Only the first line that differs is told: those behind it share its allowance."""
    allowance = _allowance(using, report)
    rules = RuleBook(using)
    periods = sorted(report.since, key=int)
    groups = chained.from_iterable(_groups(report, period, report.since[period], places) for period in periods)
    again = (usage_line(report, 0, group, rules, allowance) for group in Limits(using, rules).of(groups))
    stored = (line for line in _stored(using, report) if line.charge_category == USAGE and not _unknown_only(line))
    for expected, found in zip_longest(again, stored):
        if found is None:
            yield f"report {report}: it lacks line {expected.line_id} ({expected.key}, {expected.meter})"
            return
        if expected is None:
            yield f"report {report}: line {found.line_id} ({found.key}, {found.meter}) has no usage in the ledger"
            return
        for name in _MADE_AGAIN:
            if getattr(found, name) != getattr(expected, name):
                yield (
                    f"report {report}: line {found.line_id} ({found.key}, {found.meter}) has {name}"
                    f" {getattr(found, name)}, the ledger says {getattr(expected, name)}"
                )
                return


def _unknown_only(line: ReportLine) -> bool:
    return not (line.admitted_count or line.denied_count or line.consumed_quantity or line.refunded_quantity) and bool(
        line.unknown_count
    )


def _groups(report: Report, period: str, since: Mapping[str, int], places: tuple[str, ...]) -> Iterator[Group]:
    return grouped(Q(account=report.account, period=int(period)) & between(since, report.chain), *places)


def _allowance(using: str, report: Report) -> Allowance:
    before = ReportLine.objects.using(using).filter(
        report__account=report.account, report__period_start=report.period_start, report__version__lt=report.version
    )
    sums = list(before.values_list("meter").order_by().annotate(Sum("included_quantity"), Sum("overage_quantity")))
    return Allowance(
        report.included, {name: used for name, used, _over in sums}, {name: over for name, _used, over in sums}
    )
