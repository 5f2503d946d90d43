"""Write and compare the conditional part of a manifest: columns that the app itself can change later.

A column is compared only if the app had no reason to change it.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import groupby
from operator import attrgetter
from typing import Any

from ratelimits.billing.reports.build import CHUNK
from ratelimits.billing.reports.verify import manifest_history, manifest_sections
from ratelimits.billing.reports.verify.manifest_sections import was_dropped
from ratelimits.engine.server import shards_can_move
from ratelimits.progress import Progress
from ratelimits.usage.ledger.verify.row_digests import digest_of, rows_of
from ratelimits.usage.ledger.watermark import TOLERANCE
from ratelimits.usage.models import ArchivedRange, Batch, DurabilityGap, GapKind, ShardState
from ratelimits.usage.models.gaps import of_shard
from ratelimits.usage.periods import SECOND, month_window

#: Maximum difference between the clocks of the machine that declared a gap and the machine that wrote a manifest.
_MAX_CLOCK_DIFFERENCE = timedelta(hours=1)


def build(
    using: str,
    month: str,
    states: Sequence[ShardState],
    history: Mapping[str, dict[str, Any]],
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Return the conditional part of a manifest. `history` is the section `history` of the manifest."""
    start, end = month_window(month)
    return {
        "states": {str(state.shard): [state.run, state.watermark, state.ahead] for state in states},
        "batches": dict(_batches(using, end, progress)),
        "archived_at": _archived_at(using),
        "process_names": dict(manifest_sections.process_names(using, start, end, progress)),
        "newer_than_history": manifest_history.newer_than_history(using, history),
    }


def compare(using: str, manifest: dict[str, Any], sources: Sequence[str], checked: Counter[str]) -> Iterator[str]:
    """Yield a sentence for each difference that the app itself cannot have made.

    `sources` are the aliases of the databases that contain the ledger's batches. `checked` counts the entries.
    """
    conditional: dict[str, Any] = manifest["conditional"]
    checked["entries of manifests"] += sum(map(len, conditional.values()))
    yield from _compare_shards(using, manifest, conditional, sources)
    yield from _compare_rows(using, manifest, conditional)


def _compare_shards(
    using: str, manifest: dict[str, Any], conditional: dict[str, Any], sources: Sequence[str]
) -> Iterator[str]:
    """Compare the shards' states and batches."""
    manifest_name = f"the manifest of {manifest['month']}"
    written = datetime.fromisoformat(manifest["written_at"])
    states = ShardState.objects.using(using).in_bulk()
    for shard, listed in conditional["states"].items():
        state = states.get(int(shard))
        position, _digest = manifest["shards"][shard]
        if state is not None:
            yield from (
                f"shard {state} has another {column} than in {manifest_name}, and nothing in the ledger explains it"
                for column in _unexplained_columns(using, sources, state, listed, position, written)
            )
    for shard, entry in conditional["batches"].items():
        yield from (f"{change} than in {manifest_name}" for change in _changed_batches(sources, int(shard), entry))


def _compare_rows(using: str, manifest: dict[str, Any], conditional: dict[str, Any]) -> Iterator[str]:
    """Compare archived ranges, process totals, and rows of the configuration."""
    manifest_name = f"the manifest of {manifest['month']}"
    start, end = month_window(manifest["month"])
    current = _archived_at(using)
    for pk, archived_at in conditional["archived_at"].items():
        if current.get(pk, archived_at) != archived_at:  # `_archived_at` leaves out ranges that were restored.
            yield f"archived range {pk} differs from {manifest_name}"
    names = dict(manifest_sections.process_names(using, start, end))
    for name, digest in conditional["process_names"].items():
        is_dropped = name not in names and was_dropped(using, name)
        if names.get(name) != digest and not is_dropped:
            yield f"the process totals of the kind and day {name} have other process names than in {manifest_name}"
    for name, digest in manifest_history.newer_than_history(using, manifest["history"]).items():
        if conditional["newer_than_history"].get(name) != digest:
            yield (
                f"{name} has a `version` or `since` above that of its newest edit,"
                f" and {manifest_name} does not list these values"
            )


def _unexplained_columns(
    using: str, sources: Sequence[str], state: ShardState, listed: Sequence[Any], position: int, written: datetime
) -> Iterator[str]:
    """Yield the columns of a shard's state that differ from the manifest, if no later batch or gap explains why.

    The names of the columns are "run", "watermark" and "clock". `listed` has their values in the manifest: the run, the
    watermark, and by how many µs the server's clock was ahead of the drain's clock. The manifest was written at the
    moment `written`. `position` is the position of the shard's newest batch at that moment.
    """
    run, watermark, ahead = listed
    # "" in the manifest: the run was not known yet.
    if run not in ("", state.run) and not _may_have_new_run(using, sources, state, position, written):
        yield "run"
    gaps = DurabilityGap.objects.using(using).filter(kind=GapKind.CLOCK, shard=state.shard)
    since = int(written.timestamp()) * SECOND - TOLERANCE
    if (state.watermark < watermark or state.ahead != ahead) and not gaps.filter(until__gte=since).exists():
        yield "watermark" if state.watermark < watermark else "clock"


def _may_have_new_run(using: str, sources: Sequence[str], state: ShardState, position: int, written: datetime) -> bool:
    """Return whether something explains why the shard's run has changed since its chain ended at `position`."""
    newer = {"shard": state.shard, "position__gt": position, "sealed_run": state.run}
    if any(Batch.objects.using(source).filter(**newer).exists() for source in sources):
        return True
    gaps = DurabilityGap.objects.using(using).filter(of_shard(state.shard), kind=GapKind.RESTART)
    if gaps.filter(event__endswith=f">{state.run}", declared_at__gte=written - _MAX_CLOCK_DIFFERENCE).exists():
        return True
    if ArchivedRange.objects.using(using).filter(shard=state.shard, last_position__gt=position).exists():
        return True
    # On another server, a shard has another run.
    return shards_can_move()


def _batches(using: str, end: int, progress: Progress | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield for each shard: the fences of its batches, and digests of the moments at which the batches were written.

    A fence says how the drain made sure that Redis had saved the batch. Batches that were sealed after `end` (µs)
    have a separate digest, because compaction can still join these batches.
    """
    columns = ("shard", "first_position", "position", "fence", "sealed_at", "applied_at")
    batches_of_ledger = Batch.objects.using(using).order_by("shard", "position").values_list(*columns, named=True)
    rows = manifest_sections.counted(progress, "batches", batches_of_ledger)
    for shard, group in groupby(rows, key=attrgetter("shard")):
        #: Each item: the first and the last position of successive batches with the same fence, and this fence.
        fences: list[list[Any]] = []
        #: Each item: the first and the last position of some batches, their number, and their digest. The batches that
        #: were sealed before `end` and the later batches are separate items.
        written = []
        for _before_end, batches in groupby(group, key=lambda batch: batch.sealed_at < end):
            first, last, count, digest = 0, 0, 0, hashlib.sha256()
            for _shard, begin, last, fence, _sealed, applied in batches:
                # Positions begin with 1, so `first` is 0 only before the first batch.
                first = first or begin
                count += 1
                digest.update(digest_of((last, applied)).encode())
                # A batch that follows the batches of the last item, and has the same fence, is added to this item.
                if fences and fences[-1][1:] == [begin - 1, fence]:
                    fences[-1][1] = last
                else:
                    fences.append([begin, last, fence])
            written.append([first, last, count, digest.hexdigest()])
        yield str(shard), {"fences": fences, "written": written}


def _changed_batches(sources: Sequence[str], shard: int, entry: Mapping[str, Any]) -> Iterator[str]:
    """Yield the start of a sentence for each change of a batch. Batches in missing archives are not compared."""

    def between(first: int, last: int) -> list[Any]:
        within = {"shard": shard, "first_position__gte": first, "position__lte": last}
        return [Batch.objects.using(source).filter(**within).order_by("position") for source in sources]

    for first, last, fence in entry["fences"]:
        for batches in between(first, last):
            if (changed := batches.exclude(fence=fence).first()) is not None:
                yield f"batch {changed} has another fence ({changed.fence!r})"
    for first, last, count, listed in entry["written"]:
        current_count, digest = 0, hashlib.sha256()
        parts = (batches.values_list("position", "applied_at").iterator(CHUNK) for batches in between(first, last))
        for current_count, row in enumerate(heapq.merge(*parts), 1):  # noqa: B007
            digest.update(digest_of(row).encode())
        # If batches were joined, or if an archive is missing, there are fewer batches, and no digest can be compared.
        if current_count == count and digest.hexdigest() != listed:
            yield f"batches {first} to {last} of shard {shard:02d} were written at other times"


def _archived_at(using: str) -> dict[str, str]:
    return rows_of(ArchivedRange.objects.using(using), "pk", ["archived_at"])
