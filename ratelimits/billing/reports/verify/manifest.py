"""Write the manifest of a month, and compare it with the database.

A manifest is a signed file outside the database. It shows whether the rows that it lists were changed later. It lists
the reports of the month's periods, with their digests and totals. For each shard, it has the position
and the digest of the newest batch. It also has digests of rows that no digest in the database protects: adjustments,
durability gaps, process totals, quarantined batches, billing periods, deliveries, and the history of the configuration.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial, reduce
from typing import Any

from django.db.models import Count, Max

from ratelimits.algorithms import calendar
from ratelimits.billing.models import Adjustment, Report
from ratelimits.billing.reports.closing.labelled import open_in
from ratelimits.billing.reports.verify import manifest_conditional, manifest_history, manifest_sections
from ratelimits.billing.reports.verify.manifest_sections import TABLES
from ratelimits.conf import conf
from ratelimits.models.customers import make_missing
from ratelimits.progress import Progress
from ratelimits.usage import signatures
from ratelimits.usage.ledger.packet import chained
from ratelimits.usage.ledger.verify.row_digests import row_columns, rows_of
from ratelimits.usage.models import ArchivedRange, Batch, ProcessTotal, ShardState
from ratelimits.usage.periods import SECOND, checked_month, month_window

FORMAT = "ratelimits manifest 5"
#: Maximum number of times that the rows are read. If a report is finalised meanwhile, they are read again.
_TRIES = 3
#: Maximum time from the start of an edit until its commit. An edit that started before a manifest was written can be
#: committed afterwards.
_MAX_TRANSACTION = timedelta(hours=1)


class ManifestError(ValueError):
    """Raised if a file is not a manifest; the message says why."""


#: For each section of a manifest, the words with which messages name one of its entries.
_ENTRY_NAMES = {
    "reports": "report",
    **{section: table.entry_name for section, table in TABLES.items()},
    "deliveries": "the entry for deliveries of",
    "process_totals": "the entry for process totals of the kind and day",
}
#: The sections of a manifest that are JSON objects.
_OBJECTS = (*_ENTRY_NAMES, "shards", "columns", "history", "without_history")
#: Sections from which the app itself can delete an entry. Each has a function that takes the alias of the database, the
#: name of an entry, and the month. It returns whether the app deleted this entry.
_MAY_DISAPPEAR: dict[str, Callable[[str, str, str], bool]] = {
    "process_totals": lambda using, name, _month: manifest_sections.was_dropped(using, name),
}


def build(using: str, month: str, progress: Progress | None = None) -> dict[str, Any]:
    """Return the signed manifest of a month like "2026-10".

    `progress` shows the stages that can take long. Raise ValueError if `month` is not a month.
    """
    columns = _columns()
    # The digests of process totals include the salts of account texts, so each text needs one now.
    start, end = month_window(month)
    totals = ProcessTotal.objects.using(using).filter(bin__gte=start // SECOND, bin__lt=end // SECOND)
    make_missing(using, totals.order_by().values_list("account", flat=True).distinct())
    for _try in range(_TRIES):
        before = _fingerprint(using)
        listed = _sections(using, month, columns, progress)
        # If the numbers differ, a report was finalised meanwhile, and is perhaps not in all sections. So read again.
        if _fingerprint(using) == before:
            break
    states = list(ShardState.objects.using(using).order_by("shard"))
    history = manifest_history.history(using, progress=progress)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "month": month,
        "written_at": datetime.now(UTC).isoformat(),
        "key_id": signatures.key_id(conf.SIGNING_KEY),
        "time_zones": calendar.ZONES_VERSION,
        "shards": {str(state.shard): [state.position, state.head] for state in states},
        "open": _open(using, month),
        "unsettled": manifest_sections.unsettled(using, month),
        "columns": columns,
        "history": history,
        "without_history": manifest_history.digests_without_history(using),
        "conditional": manifest_conditional.build(using, month, states, history, progress),
        "totals": _month_totals(listed["reports"]),
        **listed,
    }
    manifest["signature"] = signatures.sign(_signed_text(manifest))
    return manifest


def _columns() -> dict[str, list[str]]:
    """Return the columns from which digests are made, by section."""
    return {
        **{section: row_columns(table.model) for section, table in TABLES.items()},
        "deliveries": list(manifest_sections.DELIVERY),
    }


def _signed_text(manifest: dict[str, Any]) -> str:
    signed = {name: value for name, value in manifest.items() if name != "signature"}
    return json.dumps(signed, sort_keys=True, separators=(",", ":"))


def _fingerprint(using: str) -> dict[str, Any]:
    """Return numbers that change when a report is finalised or an adjustment is added."""
    return {
        **Report.objects.using(using).aggregate(Max("pk")),
        **Adjustment.objects.using(using).aggregate(Count("pk"), Count("report")),
    }


def _sections(
    using: str, month: str, columns: Mapping[str, list[str]], progress: Progress | None
) -> dict[str, dict[str, Any]]:
    """Return the sections that list reports and rows: for each section, its entries by name.

    `columns` has the columns from which digests are made, by section.
    """
    start, end = month_window(month)
    return {
        "reports": dict(manifest_sections.reports(using, month, progress)),
        **{
            section: rows_of(table.rows(using, month), table.name_column, columns[section])
            for section, table in TABLES.items()
        },
        "deliveries": dict(manifest_sections.deliveries(using, month, columns["deliveries"], progress)),
        "process_totals": dict(manifest_sections.process_totals(using, start, end, progress)),
    }


def _month_totals(reports: Mapping[str, dict[str, Any]]) -> dict[str, list[int]]:
    """Return the sums of all reports' totals, by meter."""
    totals: dict[str, list[int]] = {}
    for report in reports.values():
        for meter, counts in report["totals"].items():
            total = totals.get(meter, [0] * len(counts))
            totals[meter] = [number + count for number, count in zip(total, counts, strict=True)]
    return totals


def _open(using: str, month: str) -> list[str]:
    """Return the names of the month's periods with usage or adjustments that are not on a report yet."""
    names = {(customer.account, period.name) for customer, period in open_in(using, month)}
    waiting = TABLES["adjustments"].rows(using, month).filter(report=None, approval=Adjustment.Approval.WAITING)
    # Perhaps the period of such an adjustment has a report. Then it needs a new version.
    names |= {(account, month) for account in waiting.values_list("account", flat=True)}
    return [f"{account or 'anonymous'} {name}" for account, name in sorted(names)]


def parse(text: str) -> dict[str, Any]:
    """Return the manifest in the text of a file. Raise ManifestError if the text is not a manifest."""
    try:
        manifest = json.loads(text)
        if manifest["format"] != FORMAT:
            raise ManifestError(
                f"its format is {manifest['format']!r}, but this version of ratelimits reads {FORMAT!r}: use the"
                " version that wrote the manifest"
            )
        checked_month(manifest["month"])
        checks = [isinstance(manifest[section], dict) for section in _OBJECTS]
        checks += [isinstance(manifest["open"], list)]
        checks += [isinstance(manifest["columns"][section], list) for section in (*TABLES, "deliveries")]
        checks += [isinstance(manifest["conditional"], dict)]
        checks += [isinstance(manifest["signature"], str), datetime.fromisoformat(manifest["written_at"]).tzinfo == UTC]
        checks += [type(entry["newest"]) is int for entry in manifest["history"].values()]
        checks += [isinstance(entry["columns"], list) for entry in manifest["history"].values()]
        checks += [
            shard.isdecimal() and type(position) is int and isinstance(head, str)
            for shard, (position, head) in manifest["shards"].items()
        ]
        if not all(checks):
            raise ManifestError("some of its values do not have the types that ratelimits_manifest writes")
    except ManifestError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ManifestError(f"it is not a complete manifest of a month: {error!r}") from error
    checked_manifest: dict[str, Any] = manifest
    return checked_manifest


def compare(
    using: str,
    manifest: dict[str, Any],
    *sources: str,
    checked: Counter[str] | None = None,
    digests_without_history: Callable[[], Mapping[str, str]] | None = None,
    progress: Progress | None = None,
) -> Iterator[str]:
    """Yield a sentence for each difference between the database and a manifest.

    `sources` are the aliases of the databases that contain the ledger's batches, by default `using`. `checked`
    counts the compared entries. `digests_without_history` is called instead of the function of this name in
    `manifest_history`, so that a caller with several manifests can read these digests only once. `progress` shows the
    stages that can take long.
    """
    month = manifest["month"]
    checked = Counter() if checked is None else checked
    if error := signatures.error_of(_signed_text(manifest), manifest["signature"]):
        key = manifest.get("key_id") or "none"
        yield f"the manifest of {month} (key {key}) was changed after it was written, or its key is unknown: {error}"
    equal: Counter[str] = Counter()
    heads = list(_heads(using, manifest, sources or (using,), equal))
    checked.update(equal)
    if heads and not equal:
        yield (
            f"no shard has the digest that the manifest of {month} lists for it: the manifest is of another database,"
            " or the ledger was written again, or the ledger was restored to a state before the manifest"
        )
        return
    yield from heads
    columns = manifest["columns"]
    for section, known in _columns().items():
        if missing := set(columns.get(section, ())) - set(known):
            names = ", ".join(sorted(map(str, missing)))
            yield (
                f"the manifest of {month} has the columns {names} of {section}, which this version of ratelimits does"
                " not have: use the version that wrote the manifest"
            )
            return
    sections = _sections(using, month, columns, progress)
    for section, entry_name in _ENTRY_NAMES.items():
        # The section's entries by name: in the manifest, and in the database now.
        listed, current = manifest[section], sections[section]
        for name in sorted(listed.keys() | current.keys()):
            checked["entries of manifests"] += 1
            if name not in current:
                if section not in _MAY_DISAPPEAR or not _MAY_DISAPPEAR[section](using, name, month):
                    yield f"{entry_name} {name} is in the manifest of {month}, but no longer exists"
            elif name not in listed:
                if section == "periods":
                    continue  # An edit of an account freezes past periods too, also those without usage.
                yield f"{entry_name} {name} is not in the manifest of {month}: it is newer, so write another manifest"
            elif listed[name] != current[name]:
                yield f"{entry_name} {name} differs from the manifest of {month}"
    read_digests = digests_without_history or partial(manifest_history.digests_without_history, using)
    yield from _compare_history(using, manifest, read_digests(), checked, progress)
    yield from manifest_conditional.compare(using, manifest, sources or (using,), checked)


def _compare_history(
    using: str,
    manifest: dict[str, Any],
    without_history: Mapping[str, str],
    checked: Counter[str],
    progress: Progress | None,
) -> Iterator[str]:
    """Yield an error for each model of the configuration whose history was changed after the manifest.

    Also yield an error for each row without history that differs from the manifest, and for each new record with a date
    before the manifest.
    """
    month, listed = manifest["month"], manifest["history"]
    current = manifest_history.history(using, listed, progress)
    for name in sorted(listed):
        checked["entries of manifests"] += 1
        if missing := set(listed[name]["columns"]) - set(current.get(name, {}).get("columns", ())):
            names = ", ".join(sorted(map(str, missing)))
            yield (
                f"the manifest of {month} has the columns {names} of the history of {name}, which this version of"
                " ratelimits does not have: use the version that wrote the manifest"
            )
        elif current[name] != listed[name]:
            yield (f"the history of {name} up to record {listed[name]['newest']} differs from the manifest of {month}")
    for name, digest in without_history.items():
        if manifest["without_history"].get(name) != digest:
            yield (
                f"{name} has no history, and differs from the manifest of {month}: it was written without the app"
                " (ratelimits_reload records this change as an edit)"
            )
    written = datetime.fromisoformat(manifest["written_at"]) - _MAX_TRANSACTION
    for record in manifest_history.backdated_records(using, listed, int(written.timestamp()) * SECOND):
        yield f"the history of {record} has an edit from before the manifest of {month} that the manifest does not list"


def _heads(using: str, manifest: dict[str, Any], sources: tuple[str, ...], equal: Counter[str]) -> Iterator[str]:
    """Yield an error for each shard whose chain has another digest than in the manifest.

    Skip batches in missing archives. Count the equal digests in `equal`.
    """
    # The head of a shard is the digest of its newest batch.
    for shard, (position, head) in sorted(manifest["shards"].items(), key=lambda item: int(item[0])):
        if not position:
            continue  # The shard had no batch when the manifest was written.
        digest = _digest_at(sources, int(shard), position)
        if digest == head:
            equal["heads of chains"] += 1
        elif digest is not None:
            yield (
                f"shard {int(shard):02d} has another digest at position {position} than the manifest of"
                f" {manifest['month']}"
            )


def _digest_at(sources: tuple[str, ...], shard: int, position: int) -> str | None:
    """Return the digest of a shard's chain at a position. The position can be within a compacted batch.

    Return "" if there is no batch, and None if the batch is only in an archive.
    """
    ranges = ArchivedRange.objects.using(sources[0]).filter(shard=shard, first_position__lte=position)
    archived = ranges.filter(last_position__gte=position).first()
    if archived is not None and archived.last_position == position:
        return archived.digest
    for using in sources:
        batches = Batch.objects.using(using).filter(shard=shard, first_position__lte=position, position__gte=position)
        batch = batches.first()
        if batch is not None:
            contents = batch.contents()[: position - batch.first_position + 1]
            return reduce(chained, contents, batch.previous_digest)
    return "" if archived is None else None
