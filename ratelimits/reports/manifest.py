"""The manifest of a month: one signed file outside the database, with which everything that it lists can be proven.

It has every report of the periods that start in the month, with its digest and totals; where each shard's chain stood;
and what no digest in the database covers: adjustments, durability gaps, totals of processes, quarantined batches.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import reduce
from typing import Any, NamedTuple

from django.db.models import Count, Max, QuerySet, Sum

from ratelimits import signatures
from ratelimits.conf import conf
from ratelimits.models import (
    Adjustment,
    ArchivedRange,
    Batch,
    DurabilityGap,
    Line,
    PeriodUsage,
    ProcessTotal,
    QuarantinedBatch,
    Report,
    ReportLine,
    ShardState,
)
from ratelimits.models.ledger import moment
from ratelimits.reports.build import CHUNK, in_order
from ratelimits.reports.periods import SECOND, iso, month_window, starts_in
from ratelimits.reports.rows import report_id
from ratelimits.reports.terms import TermsBook
from ratelimits.usage.archive import day_of
from ratelimits.usage.packet import chained

FORMAT = "ratelimits manifest 2"
_TOTALS = ("consumed_quantity", "included_quantity", "overage_quantity", "refunded_quantity")
_TIMES = 3


class ManifestError(ValueError):
    """A file that is not a manifest; the message says why."""


class _Table(NamedTuple):
    """Rows that a manifest has a digest of, each by the column that names it."""

    what: str
    name: str
    rows: Callable[[str, int, int], QuerySet[Any]]


#: The sections of digests of rows; the callable returns those of the month between two moments in µs.
_TABLES = {
    "adjustments": _Table(
        "adjustment",
        "reference",
        lambda using, start, end: Adjustment.objects.using(using).filter(
            period_start__gte=moment(start), period_start__lt=moment(end)
        ),
    ),
    "gaps": _Table(
        "durability gap",
        "event",
        lambda using, start, end: DurabilityGap.objects.using(using).filter(since__lt=end, until__gte=start),
    ),
    "quarantined": _Table("quarantined batch", "id", lambda using, start, end: _quarantined(using, start, end)),
}
#: What each section lists, as sentences name it.
_LISTED = {
    "reports": "report",
    **{section: table.what for section, table in _TABLES.items()},
    "process_totals": "the totals of processes that were",
}


def build(using: str, month: str) -> dict[str, Any]:
    """Return the signed manifest of a month like "2026-10". Raises ValueError for what is not a month."""
    columns = {section: _columns(table) for section, table in _TABLES.items()}
    for _try in range(_TIMES):
        before = _newest(using)
        listed = _sections(using, month, columns)
        if _newest(using) == before:
            break  # else a report that was finalised meanwhile is in one section and not in another
    states = ShardState.objects.using(using).order_by("shard")
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "month": month,
        "written_at": datetime.now(UTC).isoformat(),
        "key_id": signatures.key_id(conf.SIGNING_KEY),
        "shards": {str(state.shard): [state.position, state.head] for state in states},
        "open": _open(using, month),
        "columns": columns,
        "totals": _month_totals(listed["reports"]),
        **listed,
    }
    manifest["signature"] = signatures.sign(_signed_text(manifest))
    return manifest


def _signed_text(manifest: dict[str, Any]) -> str:
    signed = {name: value for name, value in manifest.items() if name != "signature"}
    return json.dumps(signed, sort_keys=True, separators=(",", ":"))


def _columns(table: _Table) -> list[str]:
    return [field.attname for field in table.rows("default", 0, 0).model._meta.concrete_fields]


def _newest(using: str) -> dict[str, Any]:
    return {
        **Report.objects.using(using).aggregate(Max("pk")),
        **Adjustment.objects.using(using).aggregate(Count("pk"), Count("report")),
    }


def _sections(using: str, month: str, columns: Mapping[str, list[str]]) -> dict[str, dict[str, Any]]:
    start, end = month_window(month)
    return {
        "reports": dict(_reports(using, month, start, end)),
        **{
            section: _rows(table.rows(using, start, end), table.name, columns[section])
            for section, table in _TABLES.items()
        },
        "process_totals": dict(_process_totals(using, start, end)),
    }


def _reports(using: str, month: str, start: int, end: int) -> Iterator[tuple[str, dict[str, Any]]]:
    reports = Report.objects.using(using).filter(period_start__gte=start, period_start__lt=end)
    # Before their lines: those of a report that is finalised in between would be missing.
    found = list(reports.order_by("period_start", "account", "version").iterator(CHUNK))
    within = {"report__period_start__gte": start, "report__period_start__lt": end}
    sums = ReportLine.objects.using(using).filter(**within).values_list("report", "meter").order_by()
    totals: dict[int, dict[str, list[int]]] = {}
    for report, meter, *counts in sums.annotate(*(Sum(name) for name in _TOTALS)).iterator(CHUNK):
        totals.setdefault(report, {})[meter] = counts
    for each in found:
        if starts_in(month, each.period_start, each.timezone):
            yield (
                f"{report_id(each.account, each.period_start)} v{each.version}",
                {
                    "digest": each.digest,
                    "lines": each.line_count,
                    "signature": each.signature,
                    "finalised_at": each.finalised_at.isoformat(),
                    "totals": totals.get(each.pk, {}),
                    **({"amounts": each.amounts} if each.amounts else {}),
                },
            )


def _month_totals(reports: Mapping[str, dict[str, Any]]) -> dict[str, list[int]]:
    """Return the sums of all reports, by meter."""
    totals: dict[str, list[int]] = {}
    for report in reports.values():
        for meter, counts in report["totals"].items():
            had = totals.get(meter, [0] * len(counts))
            totals[meter] = [one + other for one, other in zip(had, counts, strict=True)]
    return totals


def _open(using: str, month: str) -> list[str]:
    """Name the periods of the month whose usage, or whose adjustments, no report has yet."""
    start, end = month_window(month)
    usage = PeriodUsage.objects.using(using).filter(covered=None)
    usage = usage.filter(period__gte=start // SECOND, period__lt=end // SECOND)
    waiting = _TABLES["adjustments"].rows(using, start, end).filter(report=None)
    waiting = waiting.exclude(approval=Adjustment.Approval.REFUSED)
    found = {(account, period * SECOND) for account, period in usage.values_list("account", "period").distinct()}
    found |= {(account, int(at.timestamp()) * SECOND) for account, at in waiting.values_list("account", "period_start")}
    terms = TermsBook(using).of({account for account, _period in found})
    return [
        f"{account or 'anonymous'} {iso(period)}"
        for account, period in sorted(found)
        if starts_in(month, period, terms[account].timezone)
    ]


def _quarantined(using: str, start: int, end: int) -> QuerySet[Any]:
    """Those with usage of the month: of others some may come at any time. One that cannot be read may have any."""
    rows = QuarantinedBatch.objects.using(using)
    names = [pk for pk, fields in rows.values_list("pk", "fields").iterator(CHUNK) if _touches(fields, start, end)]
    return rows.filter(pk__in=names)


def _touches(fields: Any, start: int, end: int) -> bool:
    try:
        return int(fields["#o"]) < end and int(fields["#t"]) >= start
    except (KeyError, TypeError, ValueError):
        return True


def _rows(rows: Any, name: str, columns: list[str]) -> dict[str, str]:
    """Return a digest of these columns of each row, by what names it."""
    found = rows.order_by("pk").values_list(name, *columns).iterator(CHUNK)
    return {str(called): _digest(values) for called, *values in found}


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, default=_text, sort_keys=True).encode()).hexdigest()


def _text(value: Any) -> str:
    return value.astimezone(UTC).isoformat() if isinstance(value, datetime) else str(value)


def _process_totals(using: str, start: int, end: int) -> Iterator[tuple[str, str]]:
    """Yield a digest for each kind and day, over processes: what is old is added up over them."""
    place = ("kind", "bin", "account", "key", "meter")
    rows = ProcessTotal.objects.using(using).filter(bin__gte=start // SECOND, bin__lt=end // SECOND)
    sums = rows.values_list(*place).order_by(*in_order(using, *place)).annotate(Sum("requests"), Sum("units"))
    digests: dict[tuple[str, int], Any] = {}
    for row in sums.iterator(CHUNK):
        digests.setdefault((row[0], day_of(row[1])), hashlib.sha256()).update(_digest(row).encode())
    for (kind, day), digest in digests.items():
        yield f"{kind} {iso(day * SECOND)}", digest.hexdigest()


def parse(text: str) -> dict[str, Any]:
    """Return the manifest that a file's text is. Raises ManifestError."""
    try:
        manifest = json.loads(text)
        if manifest["format"] != FORMAT:
            raise ManifestError(
                f"its format is {manifest['format']!r}, and this version of ratelimits reads {FORMAT!r}: compare with"
                " the version that wrote it"
            )
        month_window(manifest["month"])
        shaped = [isinstance(manifest[name], dict) for name in (*_LISTED, "shards", "columns")]
        shaped += [isinstance(manifest[name], list) for name in ("open",)]
        shaped += [isinstance(manifest["columns"][section], list) for section in _TABLES]
        shaped += [isinstance(manifest["signature"], str)]
        shaped += [
            shard.isdecimal() and type(at) is int and isinstance(head, str)
            for shard, (at, head) in manifest["shards"].items()
        ]
        if not all(shaped):
            raise ManifestError("a part of it is not of the type that ratelimits_manifest writes")
    except ManifestError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ManifestError(f"it is not the manifest of a month, or not all of it: {error!r}") from error
    found: dict[str, Any] = manifest
    return found


def compare(using: str, manifest: dict[str, Any], *sources: str, checked: Counter[str] | None = None) -> Iterator[str]:
    """Say what is not as a manifest lists it, one sentence for each finding; nothing if all is.

    `sources` are the databases that the ledger's batches are in, by default `using`. `checked` is given the number of
    things that were compared.
    """
    month, checked = manifest["month"], Counter() if checked is None else checked
    if wrong := signatures.wrong(_signed_text(manifest), manifest["signature"]):
        key = manifest.get("key_id") or "none"
        yield f"the manifest of {month} (key {key}) was changed after it was written, or signed by another: {wrong}"
    right: Counter[str] = Counter()
    heads = list(_heads(using, manifest, sources or (using,), right))
    checked.update(right)
    if heads and not right:
        yield (
            f"no shard has the digest that the manifest of {month} has: it is of another database, or the ledger was"
            " written anew, or set back to a state before it"
        )
        return
    yield from heads
    columns = manifest["columns"]
    for section, table in _TABLES.items():
        if lost := set(columns[section]) - set(_columns(table)):
            yield (
                f"the manifest of {month} has the columns {', '.join(sorted(map(str, lost)))} of {section}, which this"
                " version of ratelimits does not have: compare with the version that wrote it"
            )
            return
    now = _sections(using, month, columns)
    for section, what in _LISTED.items():
        listed, found = manifest[section], now[section]
        for name in sorted(listed.keys() | found.keys()):
            checked["entries of manifests"] += 1
            if name not in found:
                if section != "process_totals" or not _dropped(using, name):
                    yield f"{what} {name} is in the manifest of {month}, and gone"
            elif name not in listed:
                yield f"{what} {name} is not in the manifest of {month}: it came after it, so write a further one"
            elif listed[name] != found[name]:
                yield f"{what} {name} is not what the manifest of {month} says"


def _dropped(using: str, name: str) -> bool:
    """Return whether totals of a day were dropped with the ledger's lines of that day, when those were archived."""
    kind, _space, day = name.partition(" ")
    start = int(datetime.fromisoformat(day).timestamp())
    lines = Line.objects.using(using).filter(bin__gte=start, bin__lt=start + 86_400)
    return kind == "admitted" and ArchivedRange.objects.using(using).exists() and not lines.exists()


def _heads(using: str, manifest: dict[str, Any], sources: tuple[str, ...], right: Counter[str]) -> Iterator[str]:
    """Say which shards' chains have not the digests that the manifest has; those of archives away are not known."""
    for shard, (position, head) in sorted(manifest["shards"].items(), key=lambda item: int(item[0])):
        digest = _digest_at(sources, int(shard), position) if position else head
        if digest == head:
            right.update(["heads of chains"] if position else [])
        elif digest is not None:
            yield (
                f"shard {int(shard):02d} has not the digest at position {position} that the manifest of"
                f" {manifest['month']} has"
            )


def _digest_at(sources: tuple[str, ...], shard: int, position: int) -> str | None:
    """Return the digest that a shard's chain has at a position, which may lie within a compacted batch.

    "" if nothing is there, None if what is there is in an archive that is not at hand.
    """
    archived = ArchivedRange.objects.using(sources[0]).filter(shard=shard, first_position__lte=position)
    moved = archived.filter(last_position__gte=position).first()
    if moved is not None and moved.last_position == position:
        return moved.digest
    for using in sources:
        around = Batch.objects.using(using).filter(shard=shard, first_position__lte=position, position__gte=position)
        batch = around.first()
        if batch is not None:
            contents = batch.contents()[: position - batch.first_position + 1]
            return reduce(chained, contents, batch.previous_digest)
    return "" if moved is None else None
