"""The part of a manifest about columns that the app itself may change later.

Each column is compared only if the app had no reason to change it.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import groupby
from operator import itemgetter
from typing import Any

from ratelimits.engine.server import may_move
from ratelimits.models import Account, ArchivedRange, Batch, DurabilityGap, GapKind, KeptPeriod, ShardState
from ratelimits.reports.build import CHUNK
from ratelimits.reports.periods import SECOND, month_window
from ratelimits.reports.verify import manifest_sections
from ratelimits.reports.verify.manifest_sections import digest_of, dropped, rows_of
from ratelimits.usage.watermark import TOLERANCE

#: Maximum difference between the clocks of the machine that declared a gap and the machine that wrote a manifest.
_CLOCKS = timedelta(hours=1)


def build(
    using: str, month: str, states: Sequence[ShardState], history: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return this part of a manifest. `states` are the shards' states, `history` is the manifest's section."""
    start, end = month_window(month)
    return {
        "states": {str(each.shard): [each.run, each.watermark, each.ahead] for each in states},
        "batches": dict(_batches(using, end)),
        "archived_at": _archived_at(using),
        "process_names": dict(manifest_sections.process_names(using, start, end)),
        "kept_versions": _kept_versions(using, start, end),
        "newer_than_history": manifest_sections.newer_than_history(using, history),
    }


def compare(using: str, manifest: dict[str, Any], sources: Sequence[str], checked: Counter[str]) -> Iterator[str]:
    """Yield a sentence for each difference that the app itself cannot have made.

    `sources` are the aliases of the databases that contain the ledger's batches. The number of entries is added to
    `checked`. Manifests of format 3 do not have this part.
    """
    part: dict[str, Any] = manifest.get("conditional", {})
    checked["entries of manifests"] += sum(map(len, part.values()))
    if not part:
        return
    yield from _compare_shards(using, manifest, part, sources)
    yield from _compare_rows(using, manifest, part)


def _compare_shards(
    using: str, manifest: dict[str, Any], part: dict[str, Any], sources: Sequence[str]
) -> Iterator[str]:
    """Compare the shards' states and batches."""
    of_month = f"the manifest of {manifest['month']}"
    written = datetime.fromisoformat(manifest["written_at"])
    states = ShardState.objects.using(using).in_bulk()
    for shard, then in part["states"].items():
        state, position = states.get(int(shard)), manifest["shards"][shard][0]
        if state is not None:
            yield from (
                f"shard {state} has another {what} than {of_month}, and nothing in the ledger explains it"
                for what in _changed(using, sources, state, then, position, written)
            )
    for shard, entry in part["batches"].items():
        yield from (f"{each} than {of_month}" for each in _other_batches(sources, int(shard), entry))


def _compare_rows(using: str, manifest: dict[str, Any], part: dict[str, Any]) -> Iterator[str]:
    """Compare archived ranges, totals of processes, kept periods, and rows of the configuration."""
    of_month = f"the manifest of {manifest['month']}"
    start, end = month_window(manifest["month"])
    now = _archived_at(using)
    for pk, archived_at in part["archived_at"].items():
        if now.get(pk, archived_at) != archived_at:  # Restoring an archive deletes its ranges.
            yield f"archived range {pk} differs from {of_month}"
    names = dict(manifest_sections.process_names(using, start, end))
    for name, digest in part["process_names"].items():
        if names.get(name) != digest and not (name not in names and dropped(using, name)):
            yield f"the process totals of kind and day {name} have other process names than in {of_month}"
    versions = _kept_versions(using, start, end)
    for account, version in part["kept_versions"].items():
        if versions.get(account, version) != version and not _edited(using, account, manifest["history"]):
            yield f"the kept billing period of {account} has another version than in {of_month}"
    for name, digest in manifest_sections.newer_than_history(using, manifest["history"]).items():
        if part["newer_than_history"].get(name) != digest:
            yield f"{name} has a newer version or start than its newest edit; in {of_month} it was not so"


def _changed(
    using: str, sources: Sequence[str], state: ShardState, then: Sequence[Any], position: int, written: datetime
) -> Iterator[str]:
    """Yield the changed columns of a shard's state, unless a batch or a gap after the manifest explains the change."""
    run, watermark, ahead = then
    if run not in ("", state.run) and not _replaced(using, sources, state, position, written):
        yield "run"
    gaps = DurabilityGap.objects.using(using).filter(kind=GapKind.CLOCK, shard=state.shard)
    since = int(written.timestamp()) * SECOND - TOLERANCE
    if (state.watermark < watermark or state.ahead != ahead) and not gaps.filter(until__gte=since).exists():
        yield "watermark" if state.watermark < watermark else "clock"


def _replaced(using: str, sources: Sequence[str], state: ShardState, position: int, written: datetime) -> bool:
    """Return whether the shard's server may have another run now than when its chain ended at `position`."""
    newer = {"shard": state.shard, "position__gt": position, "sealed_run": state.run}
    if any(Batch.objects.using(source).filter(**newer).exists() for source in sources):
        return True
    gaps = DurabilityGap.objects.using(using).filter(kind=GapKind.RESTART, shard=state.shard)
    if gaps.filter(event__endswith=f">{state.run}", declared_at__gte=written - _CLOCKS).exists():
        return True
    if ArchivedRange.objects.using(using).filter(shard=state.shard, last_position__gt=position).exists():
        return True
    return may_move()


def _batches(using: str, end: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield, for each shard, how its batches were fenced, and a digest of the times at which they were written.

    Batches that were sealed after `end` (µs) have a separate digest, because compaction may still join them.
    """
    columns = ("shard", "first_position", "position", "fence", "sealed_at", "applied_at")
    rows = Batch.objects.using(using).order_by("shard", "position").values_list(*columns).iterator(CHUNK)
    for shard, group in groupby(rows, key=itemgetter(0)):
        fences: list[list[Any]] = []
        written = []
        for _of_month, part in groupby(group, key=lambda row: row[4] < end):
            first, last, count, digest = 0, 0, 0, hashlib.sha256()
            for _shard, begin, last, fence, _sealed, applied in part:
                first, count = first or begin, count + 1
                digest.update(digest_of((last, applied)).encode())
                if fences and fences[-1][1:] == [begin - 1, fence]:
                    fences[-1][1] = last
                else:
                    fences.append([begin, last, fence])
            written.append([first, last, count, digest.hexdigest()])
        yield str(shard), {"fences": fences, "written": written}


def _other_batches(sources: Sequence[str], shard: int, entry: Mapping[str, Any]) -> Iterator[str]:
    """Yield the start of a sentence for each difference in the batches. Skip archives that are missing."""

    def between(first: int, last: int) -> list[Any]:
        within = {"shard": shard, "first_position__gte": first, "position__lte": last}
        return [Batch.objects.using(source).filter(**within).order_by("position") for source in sources]

    for first, last, fence in entry["fences"]:
        for batches in between(first, last):
            if (wrong := batches.exclude(fence=fence).first()) is not None:
                yield f"batch {wrong} has another fence ({wrong.fence!r})"
    for first, last, count, listed in entry["written"]:
        now, digest = 0, hashlib.sha256()
        parts = (batches.values_list("position", "applied_at").iterator(CHUNK) for batches in between(first, last))
        for now, row in enumerate(heapq.merge(*parts), 1):  # noqa: B007
            digest.update(digest_of(row).encode())
        # If batches were joined, or if their archive is missing, there are fewer: then the times cannot be compared.
        if now == count and digest.hexdigest() != listed:
            yield f"batches {first} to {last} of shard {shard:02d} were written at other times"


def _archived_at(using: str) -> dict[str, str]:
    return rows_of(ArchivedRange.objects.using(using), "pk", ["archived_at"])


def _kept_versions(using: str, start: int, end: int) -> dict[str, int]:
    rows = KeptPeriod.objects.using(using).filter(start__gte=start, start__lt=end)
    return dict(rows.order_by("account").values_list("account", "version"))


def _edited(using: str, account: str, history: Mapping[str, dict[str, Any]]) -> bool:
    """Return whether an account was edited after a manifest, also if it had another name then."""
    records: Any = Account.history.using(using)
    same = records.filter(identifier=account).values("id")
    return bool(records.filter(id__in=same, pk__gt=history["account"]["newest"]).exists())
