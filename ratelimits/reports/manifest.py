"""The manifest of a month: one signed file outside the database, with which everything that it lists can be proven.

It has every report of the periods that start in the month, with its digest and totals; where each shard's chain stood;
and what no digest in the database covers: adjustments, durability gaps, totals of processes, quarantined batches.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from django.db.models import Q, Sum

from ratelimits import signatures
from ratelimits.conf import conf
from ratelimits.models import (
    Adjustment,
    ArchivedRange,
    Batch,
    DurabilityGap,
    ProcessTotal,
    QuarantinedBatch,
    Report,
    ReportLine,
    ShardState,
)
from ratelimits.models.ledger import moment
from ratelimits.reports.build import CHUNK, in_order
from ratelimits.reports.periods import SECOND, month_window, starts_in
from ratelimits.reports.rows import report_id
from ratelimits.usage.packet import chained

FORMAT = "ratelimits manifest 1"
_TOTALS = ("consumed_quantity", "included_quantity", "overage_quantity", "refunded_quantity")
#: What each section lists, as sentences name it.
_LISTED = {
    "reports": "report",
    "adjustments": "adjustment",
    "gaps": "durability gap",
    "process_totals": "the totals of processes of kind",
    "quarantined": "quarantined batch",
}


class ManifestError(ValueError):
    """A file that is no manifest; the message says why."""


def build(using: str, month: str) -> dict[str, Any]:
    """Return the signed manifest of a month like "2026-10". Raises ValueError for what is no month."""
    start, end = month_window(month)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "month": month,
        "written_at": datetime.now(UTC).isoformat(),
        "key_id": signatures.key_id(conf.SIGNING_KEY),
        "shards": {
            str(state.shard): [state.position, state.head]
            for state in ShardState.objects.using(using).order_by("shard")
        },
        **_sections(using, month, start, end),
    }
    manifest["signature"] = signatures.sign(_signed_text(manifest))
    return manifest


def _signed_text(manifest: dict[str, Any]) -> str:
    signed = {name: value for name, value in manifest.items() if name != "signature"}
    return json.dumps(signed, sort_keys=True, separators=(",", ":"))


def _sections(using: str, month: str, start: int, end: int) -> dict[str, dict[str, Any]]:
    adjusted = Q(period_start__gte=moment(start), period_start__lt=moment(end))
    return {
        "reports": dict(_reports(using, month, start, end)),
        "adjustments": _rows(Adjustment.objects.using(using).filter(adjusted), "reference"),
        "gaps": _rows(DurabilityGap.objects.using(using).filter(since__lt=end, until__gte=start), "event"),
        "process_totals": dict(_process_totals(using, start, end)),
        "quarantined": _rows(QuarantinedBatch.objects.using(using), "id"),
    }


def _reports(using: str, month: str, start: int, end: int) -> Iterator[tuple[str, dict[str, Any]]]:
    within = {"report__period_start__gte": start, "report__period_start__lt": end}
    sums = ReportLine.objects.using(using).filter(**within).values_list("report", "meter").order_by()
    totals: dict[int, dict[str, list[int]]] = {}
    for report, meter, *counts in sums.annotate(*(Sum(name) for name in _TOTALS)).iterator(CHUNK):
        totals.setdefault(report, {})[meter] = counts
    reports = Report.objects.using(using).filter(period_start__gte=start, period_start__lt=end)
    for each in reports.order_by("period_start", "account", "version").iterator(CHUNK):
        if starts_in(month, each.period_start, each.timezone):
            yield (
                f"{report_id(each.account, each.period_start)} v{each.version}",
                {
                    "digest": each.digest,
                    "lines": each.line_count,
                    "signature": each.signature,
                    "totals": totals.get(each.pk, {}),
                },
            )


def _rows(rows: Any, name: str) -> dict[str, str]:
    """Return a digest of each row, by what names it."""
    columns = [field.attname for field in rows.model._meta.concrete_fields]
    place = columns.index(name)
    return {str(values[place]): _digest(values) for values in rows.order_by("pk").values_list(*columns).iterator(CHUNK)}


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, default=_text, sort_keys=True).encode()).hexdigest()


def _text(value: Any) -> str:
    return value.astimezone(UTC).isoformat() if isinstance(value, datetime) else str(value)


def _process_totals(using: str, start: int, end: int) -> Iterator[tuple[str, str]]:
    """Yield a digest for each kind, over processes: what is old is added up over them."""
    place = ("kind", "bin", "account", "key", "meter")
    rows = ProcessTotal.objects.using(using).filter(bin__gte=start // SECOND, bin__lt=end // SECOND)
    sums = rows.values_list(*place).order_by(*in_order(using, *place)).annotate(Sum("requests"), Sum("units"))
    digests: dict[str, Any] = {}
    for row in sums.iterator(CHUNK):
        digests.setdefault(row[0], hashlib.sha256()).update(_digest(row).encode())
    for kind, digest in digests.items():
        yield kind, digest.hexdigest()


def parse(text: str) -> dict[str, Any]:
    """Return the manifest that a file's text is. Raises ManifestError."""
    try:
        manifest = json.loads(text)
        if manifest["format"] != FORMAT:
            raise ManifestError(f"its format is {manifest['format']!r}, not {FORMAT!r}")
        month_window(manifest["month"])
        if any(not isinstance(manifest[name], dict) for name in (*_LISTED, "shards")):
            raise ManifestError("a section of it is no object")
        if not isinstance(manifest["signature"], str):
            raise ManifestError("its signature is no text")
    except (ValueError, KeyError, TypeError) as error:
        raise ManifestError(f"it is no manifest of a month: {error!r}") from error
    found: dict[str, Any] = manifest
    return found


def compare(using: str, manifest: dict[str, Any], *sources: str) -> Iterator[str]:
    """Say what is not as a manifest lists it, one sentence for each finding; nothing if all is.

    `sources` are the databases that the ledger's batches are in, by default `using`.
    """
    month = manifest["month"]
    if not signatures.holds(_signed_text(manifest), manifest["signature"]):
        yield (
            f"the manifest of {month} (key {manifest.get('key_id') or 'none'}) was changed after it was signed, or was"
            " signed with a key that is neither SIGNING_KEY nor one of SIGNING_KEYS_OLD"
        )
    now = _sections(using, month, *month_window(month))
    for section, what in _LISTED.items():
        listed, found = manifest[section], now[section]
        for name in sorted(listed.keys() | found.keys()):
            if name not in found:
                yield f"{what} {name} is in the manifest of {month}, and gone"
            elif name not in listed:
                # A batch of another month may come to quarantine at any time.
                if section != "quarantined":
                    yield f"{what} {name} is not in the manifest of {month}: it came after it"
            elif listed[name] != found[name]:
                yield f"{what} {name} is not what the manifest of {month} says"
    for shard, (position, digest) in sorted(manifest["shards"].items(), key=lambda item: int(item[0])):
        if position and _digest_at(sources or (using,), int(shard), position) != digest:
            yield f"shard {int(shard):02d} has not the digest at position {position} that the manifest of {month} has"


def _digest_at(sources: tuple[str, ...], shard: int, position: int) -> str:
    """Return the digest that a shard's chain has at a position, which may lie within a compacted batch; "" for none."""
    for using in sources:
        around = Batch.objects.using(using).filter(shard=shard, first_position__lte=position, position__gte=position)
        batch = around.first()
        if batch is not None:
            parts, digest = bytes(batch.parts) or bytes.fromhex(batch.content), batch.previous_digest
            for number in range(position - batch.first_position + 1):
                digest = chained(digest, parts[32 * number : 32 * number + 32].hex())
            return digest
        archived = ArchivedRange.objects.using(using).filter(shard=shard, last_position=position).first()
        if archived is not None:
            return archived.digest
    return ""
