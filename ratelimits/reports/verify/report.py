"""Verifying reports: each is made again from the ledger, and compared line by line with what was finalised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import lru_cache
from itertools import chain as chained
from itertools import zip_longest

from django.db.models import Q

from ratelimits import signatures
from ratelimits.conf import conf
from ratelimits.models import ArchivedRange, Batch, Report, ReportLine
from ratelimits.reports import signing
from ratelimits.reports.build import CHUNK, Group, at_home, between, grouped, usage_line
from ratelimits.reports.limits import Limits
from ratelimits.reports.rows import ADJUSTMENT, joined_line_id, line_id
from ratelimits.reports.statements import version_rows
from ratelimits.reports.terms import RuleBook
from ratelimits.reports.verify.amounts import verify_amounts
from ratelimits.reports.verify.rated import Rated

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
#: What lines count that are made of ledger lines.
_QUANTITIES = (
    *("admitted_count", "denied_count", "consumed_quantity", "refunded_quantity"),
    *("included_quantity", "overage_quantity"),
)
#: Digits of the longest number that a database keeps.
_DIGITS = 19


def verify_report(report: Report, *sources: str) -> Generator[str]:
    """Yield a sentence for each thing that does not hold of one version of a report, as `ReportVerifier` does."""
    yield from ReportVerifier(report._state.db or conf.DATABASE, *sources).findings(report)


class ReportVerifier:
    """Verifies many reports; the rules and the heads of the ledger's chains that they share are read once.

    `sources` are the databases that their ledger lines are in, by default the one that they are in themselves.
    `checked` is given the number of reports and of their lines.
    """

    def __init__(self, using: str, *sources: str, checked: Counter[str] | None = None) -> None:
        self._using, self._sources = using, sources or (using,)
        self._checked = Counter() if checked is None else checked
        self._rules = RuleBook(using)
        self._limits = Limits(using, self._rules)
        self._head = lru_cache(maxsize=1000)(lambda chain: signing.chain_head(dict(chain), *self._sources))

    def findings(self, report: Report) -> Generator[str]:
        """Yield a sentence for each thing that does not hold of one version of a report; nothing if all holds.

        Cursors are open between findings: whoever stops before the end closes it.
        """
        self._checked["reports"] += 1
        try:
            for wrong in chained(self._digest(report), verify_amounts(self._using, report), self._usage(report)):
                yield f"report {report}: {wrong}"
        except (ValueError, OverflowError, TypeError) as error:
            yield f"report {report}: it has something that closing never writes, so it cannot be made again: {error!r}"

    def _digest(self, report: Report) -> Iterator[str]:
        digest, count = signing.Digest(report), 0
        for row in version_rows(report):
            digest.add(row)
            count += 1
        self._checked["report lines"] += count
        if digest.hexdigest() != report.digest:
            yield "its head or its lines are not those that its digest was made of"
        if count != report.line_count:
            yield f"it was finalised with {report.line_count} lines and has {count}"
        if wrong := signatures.wrong(report.digest, report.signature):
            yield wrong
        if report.previous_digest != self._digest_before(report):
            yield "it does not follow on the digest of the version before"

    def _digest_before(self, report: Report) -> str | None:
        """Return the digest of the version before; None if it is missing, "" for the first one."""
        if report.version == 1:
            return ""
        rows = Report.objects.using(self._using).filter(account=report.account, period_start=report.period_start)
        return rows.filter(version=report.version - 1).values_list("digest", flat=True).first()

    def _usage(self, report: Report) -> Iterator[str]:
        if not readable(report):
            yield "the positions that it was made from and up to cannot be read"
            return
        try:
            if self._head(tuple(report.chain.items())) != report.chain_head:
                yield "the ledger's chain no longer has the head that the report was made with"
        except signing.BrokenChainError as error:
            yield str(error)
            return
        found = next(self._lines(report), "")
        if found:
            # Looked for only now: what was moved while the lines were read is found, too.
            archive = self._archive_away(report)
            yield signing.moved(archive) if archive else found

    def _archive_away(self, report: Report) -> str:
        """Return the name of an archive that has some of a report's usage, and is not at hand; "" if there is none."""
        taken = Q(pk__in=())
        for since in report.since.values():
            for shard, position in report.chain.items():
                taken |= Q(shard=int(shard), last_position__gt=since.get(shard, 0), first_position__lte=position)
        for moved in ArchivedRange.objects.using(self._using).filter(taken).order_by("pk"):
            batch = {"shard": moved.shard, "position": moved.last_position}
            if not any(Batch.objects.using(source).filter(**batch).exists() for source in self._sources):
                return moved.archive
        return ""

    def _lines(self, report: Report) -> Iterator[str]:
        """Say what differs of the first line that does; those that come after it share its allowance."""
        finding = next(self._compared(report, Rated(self._using, report)), "")
        # Late usage that an earlier version of this app carried to a later period was rated by that one's allowance.
        if not finding or not next(self._compared(report, Rated(self._using, report, by_own=False)), ""):
            return
        # It also gave two lines one name, where line feeds in keys and meters made that possible.
        if next(self._compared(report, Rated(self._using, report), joined_line_id), ""):
            yield finding

    def _compared(self, report: Report, rated: Rated, named: Callable[..., str] = line_id) -> Iterator[str]:
        periods = sorted(report.since, key=int)
        groups = chained.from_iterable(self._groups(report, period, report.since[period]) for period in periods)
        at_homes = at_home(self._limits.of(groups), rated.homes)
        again = (usage_line(report, 0, group, self._rules, rated.allowances, named) for group in at_homes)
        # Not only those of the category that closing writes: whatever else a line is called, it is billed.
        lines = ReportLine.objects.using(self._using).filter(report=report).exclude(charge_category=ADJUSTMENT)
        stored = (line for line in lines.order_by("number").iterator(chunk_size=CHUNK) if _has_quantity(line))
        for expected, found in zip_longest(again, stored):
            if found is None:
                yield f"it lacks line {expected.line_id} ({expected.key}, {expected.meter})"
                return
            name = f"line {found.line_id} ({found.key}, {found.meter})"
            if expected is None:
                yield f"{name} has no usage in the ledger"
                return
            for column in _MADE_AGAIN:
                if getattr(found, column) != getattr(expected, column):
                    yield f"{name} has {column} {getattr(found, column)}, the ledger says {getattr(expected, column)}"
                    return
        yield from self._split(report, rated)

    def _split(self, report: Report, rated: Rated) -> Iterator[str]:
        """Compare how much of each adjustment is included, which depends on the lines before it."""
        allowance = rated.allowances[report.period_start]
        lines = ReportLine.objects.using(self._using).filter(report=report, charge_category=ADJUSTMENT)
        for line in lines.order_by("number").iterator(chunk_size=CHUNK):
            parts = line.included_quantity, line.overage_quantity
            expected = allowance.split(line.meter, line.consumed_quantity)
            if parts != expected:
                yield (
                    f"line {line.line_id} (an adjustment of {line.meter}) has {parts[0]} included and {parts[1]} over,"
                    f" the lines before it make {expected[0]} and {expected[1]}"
                )
                return

    def _groups(self, report: Report, period: str, since: Mapping[str, int]) -> Iterator[Group]:
        mine = Q(account=report.account, period=int(period)) & between(since, report.chain)
        return grouped(mine, *self._sources)


def readable(report: Report) -> bool:
    """Return whether the positions of a report are of the form that closing writes."""
    try:
        positions = [report.chain, *report.since.values()]
        shards = [shard for each in positions for shard in each]
        known = [position for each in positions for position in each.values()]
        numbers = [*report.since, *shards]
        return all(each.isdecimal() and len(each) <= _DIGITS for each in numbers) and all(map(_is_position, known))
    except (AttributeError, TypeError):
        return False


def _is_position(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _has_quantity(line: ReportLine) -> bool:
    """Whether it must be the sum of ledger lines: others tell of lost replies, or of a gap, and count nothing."""
    return any(getattr(line, name) for name in _QUANTITIES)
