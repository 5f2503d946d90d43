"""Declaring gaps: spans of time in which usage may be missing. An event that is noticed many times gives only one row.

Words in this module: a run is the time from a start of a server until its restart. An incarnation is a numbering of a
shard's batches. After the server was restarted or has lost the shard's data, a new incarnation starts at 1. `seq` is
the number of a batch in its incarnation, and `cum` is the sum of all counters of the incarnation up to this batch (the
running sum).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from django.db import IntegrityError, transaction
from django.db.models import F, Min, Q, QuerySet

from ratelimits.engine.transport.connection import UNREADABLE
from ratelimits.moments import moment
from ratelimits.usage.ledger.packet import CUM_MODULUS, Packet
from ratelimits.usage.ledger.pending import PendingBatches
from ratelimits.usage.models.gaps import FSYNC_POLICIES, DurabilityGap, GapChange, GapKind, ProcessTotal
from ratelimits.usage.models.ledger import COUNTERS, ArchivedRange, Batch, QuarantinedBatch, ShardState
from ratelimits.usage.models.sums import ExactSum
from ratelimits.usage.models.task_runs import TaskRun

#: The counters of a line that count requests. The others count units.
_REQUESTS = [name for name in COUNTERS if name.endswith("_requests")]
#: What missing batches without any usage have lost.
_NOTHING = {"requests": 0, "units": 0}
#: What can be missing after a restart, by the fsync policy of the server.
_DETAIL = {
    "always": "appendfsync always: no acknowledged usage can be missing",
    "everysec": "appendfsync everysec: usage after the last fsync can be missing (usually one or two seconds)",
    "none": "no fence was required: any usage that was not drained can be missing",
    "waitaof": "the server fsyncs its file: usage after the last fsync can be missing",
    "wait": "replicas had what was drained: usage that they did not have yet can be missing",
    "window": "the server loses at most its newest seconds, as the project says: this usage can be missing",
    "durable": "the project declares that the server loses no acknowledged usage",
    "replica": "a replica replaced the server: usage that the replica did not have yet can be missing",
    "unknown": "the fsync policy is unknown: any usage that was not drained can be missing",
}
#: What can have deleted the data of a server.
_WIPED = (
    "the data were deleted, or the server has not read them again at a restart, for example because its user default"
    " lacks rights (docs/scaling.md, ACL)"
)


def declare(using: str, kind: GapKind, event: str, *, since: int, until: int, fsync: str = "", **details: Any) -> int:
    """Declare a gap for an event. Return 1, or 0 if the event was declared before. Moments are µs since 1970 UTC.

    `event` is a text that is the same each time that the event is noticed. `details` are other fields of the gap.
    """
    event = f"{kind}:{event}"[:300]
    declared = DurabilityGap.objects.using(using).filter(event=event)
    if declared.exists():
        return 0
    try:
        # The transaction begins with a write: after a read, SQLite could refuse the write ("database is locked").
        with transaction.atomic(using=using):
            values = {"kind": kind, "since": min(since, until), "until": until, "fsync": fsync, **details}
            row = DurabilityGap.objects.using(using).create(event=event, **values)
            note_changes(using, [row.pk])
    except IntegrityError:
        if declared.exists():  # another process was faster
            return 0
        raise
    return 1


def change(using: str, rows: QuerySet[DurabilityGap], **values: Any) -> int:
    """Change values of declared gaps. Return how many gaps were changed."""
    with transaction.atomic(using=using):
        rows.update(until=F("until"))  # This locks the rows, on SQLite too: see `declare`.
        pks = list(rows.values_list("pk", flat=True))
        note_changes(using, pks)
        return DurabilityGap.objects.using(using).filter(pk__in=pks).update(**values) if pks else 0


def note_changes(using: str, pks: Iterable[int]) -> None:
    """Note that final reports must be compared with these gaps. Call this in the transaction that changes the gaps.

    Each change is a separate row. So a change that happens during the comparison is noticed by the next comparison.
    """
    GapChange.objects.using(using).bulk_create([GapChange(gap_id=pk) for pk in pks])


def extend(using: str, kind: GapKind, event: str, until: int) -> None:
    """Let the declared gap of an event end later: at `until` (µs since 1970 UTC)."""
    change(
        using, DurabilityGap.objects.using(using).filter(event=f"{kind}:{event}"[:300], until__lt=until), until=until
    )


class LiveRun(NamedTuple):
    """The run of a server that answers now.

    began   the moment of its start or earlier; 0 if it is not known (µs since 1970 UTC)
    server  the name of the product: "Valkey" or "Redis"
    """

    began: int = 0
    server: str = "Redis"


def declare_restart(
    using: str, state: ShardState, run: str, *, until: int, fsync: str, live_runs: Mapping[str, LiveRun]
) -> int:
    """Declare that a server was restarted or replaced: usage since the last seals of its shards may be lost.

    The first shard in which the restart is noticed declares it for all shards of the server. `until` is a moment after
    the end of the former run. If the start of the new run is known, the gap ends at this start.
    """
    of_server = list(ShardState.objects.using(using).filter(run=state.run).exclude(pk=state.pk))
    last = {each.shard: max(each.watermark, _newest_seal(using, each)) for each in (state, *of_server)}
    known = [at for at in last.values() if at]
    start = max((live.began for live in live_runs.values()), default=0)
    start = live_runs[run].began if run in live_runs and live_runs[run].began else start
    if start > max(known, default=0) and not _was_promoted(run):
        until = start
    answered = _last_drain(using)
    shards = sorted(last)
    everywhere = shards == sorted(ShardState.objects.using(using).values_list("shard", flat=True))
    harmless = fsync == "always" and not _was_promoted(run) and _was_before(using, state, "always")
    # A log that loses nothing has everything on its replicas too.
    harmless = harmless or (fsync == "durable" and _was_before(using, state, "durable"))
    return declare(
        using,
        GapKind.RESTART,
        f"{state.run}>{run}",
        shard=shards[0] if len(shards) == 1 else None,
        shards="" if everywhere or len(shards) == 1 else f",{','.join(map(str, shards))},",
        since=min(known, default=_first_count(using, state) or until),
        until=until,
        answered=min(max([*known, answered if answered <= until else 0], default=until) or until, until),
        server=live_runs[run].server if run in live_runs else "Redis",
        fsync=fsync,
        harmless=harmless,
        detail=_detail(state.run, run, fsync),
    )


def declare_promise(using: str, fence: str, at: int) -> None:
    """Declare under which promise usage of this moment is billed (µs since 1970 UTC), so that reports name it.

    The declaration is for the rest of the month (UTC). Nothing is declared if the server's fsync policy was read, and
    its fsync waited for.
    """
    if fence in FSYNC_POLICIES:
        return
    declared = DurabilityGap.objects.using(using).filter(kind=GapKind.FENCE, fsync=fence, since__lte=at, until__gte=at)
    if declared.exists():
        return
    day = moment(at).replace(hour=0, minute=0, second=0, microsecond=0)
    following = (day.replace(day=1) + timedelta(days=31)).replace(day=1)
    since, until = (int(midnight.timestamp()) * 1_000_000 for midnight in (day, following))
    declare(using, GapKind.FENCE, f"{day:%Y-%m-%d}:{fence}", since=since, until=until - 1, fsync=fence)


def _detail(former: str, run: str, fsync: str) -> str:
    """Return what can be missing after a restart."""
    if UNREADABLE in (former, run):
        return "the server's run could not be read: nobody knows whether the server restarted"
    return _DETAIL.get("replica" if _was_promoted(run) else fsync.partition("-")[0], "")


def _newest_seal(using: str, state: ShardState) -> int:
    """Return when the newest batch of the shard in the ledger was sealed (µs since 1970 UTC); 0 without a batch."""
    newest = Batch.objects.using(using).filter(shard=state.shard, position=state.position)
    return newest.values_list("sealed_at", flat=True).first() or 0


def _was_promoted(run: str) -> bool:
    """Return whether a replica became the server in this run (see lua/run.lua)."""
    return bool(run.partition(":")[2])


def _was_before(using: str, state: ShardState, fence: str) -> bool:
    """Return whether the fence was the same in the former run, as far as is known."""
    newest = Batch.objects.using(using).filter(shard=state.shard, position=state.position)
    return newest.values_list("fence", flat=True).first() in (None, fence)


def _last_drain(using: str) -> int:
    """Return when a drain last succeeded, so that the server answered (µs since 1970 UTC); 0 if it is not known."""
    runs = TaskRun.objects.using(using).filter(task=TaskRun.Task.DRAIN).values_list("succeeded_at", flat=True)
    succeeded = runs.first()
    return int(succeeded.timestamp() * 1_000_000) if succeeded else 0


def declare_missing(using: str, state: ShardState, incarnation: str, first: int, last: int, **details: Any) -> int:
    """Declare that the batches `first` to `last` of an incarnation are missing."""
    return declare(
        using,
        GapKind.MISSING,
        f"{state.shard}:{incarnation}:{first}-{last}",
        shard=state.shard,
        incarnation=incarnation,
        first_seq=first,
        last_seq=last,
        **details,
    )


def is_loss(using: str, state: ShardState, pending: PendingBatches) -> bool:
    """Return whether the server has lost usage of a shard. A loss is noticed even if no batch waits."""
    return _is_wiped(state, pending) or _is_rolled_back(state, pending) or bool(_first_lost(using, state, pending))


def _is_wiped(state: ShardState, pending: PendingBatches) -> bool:
    if state.incarnation:
        return not pending.incarnation and not pending.count
    # Without a batch in the ledger, only the time of the first seal shows that the server has lost its data. Before the
    # first drain, the first seal has noted it.
    known = max(state.watermark, state.first_sealed)
    return 0 < known < pending.first_sealed or (known > 0 and not pending.sealed_at)


def _is_rolled_back(state: ShardState, pending: PendingBatches) -> bool:
    return bool(state.incarnation) and pending.incarnation == state.incarnation and pending.seq < state.seq


def _first_lost(using: str, state: ShardState, pending: PendingBatches) -> int:
    """Return the number of the first batch that is neither in Redis nor in the ledger; 0 if no batch is lost.

    Return 0 also while a batch waits or is open: the missing batches are declared when this batch is written to the
    ledger.
    """
    if pending.count or pending.is_open or not pending.incarnation:
        return 0
    newest = state.seq
    if pending.incarnation != state.incarnation:
        numbering = {"shard": state.shard, "incarnation": pending.incarnation}
        batches = Batch.objects.using(using).filter(**numbering).order_by("-seq").values_list("seq", flat=True)
        archived = ArchivedRange.objects.using(using).filter(**numbering).order_by("-last_seq")
        newest = max(batches.first() or 0, archived.values_list("last_seq", flat=True).first() or 0)
    if pending.seq <= newest:
        return 0
    # A "~" in the name means: a second batch with the same incarnation and number (see lua/batch.lua).
    name = f"{pending.incarnation}:{pending.seq}"
    quarantined = QuarantinedBatch.objects.using(using).filter(Q(name=name) | Q(name__startswith=f"{name}~"))
    return 0 if quarantined.filter(shard=state.shard).exists() else newest + 1


def declare_loss(using: str, state: ShardState, pending: PendingBatches, *, fsync: str) -> None:
    """Declare a loss that `is_loss` has found: the server's data was wiped or rolled back, or batches are lost."""
    event = f"{state.shard}:{state.incarnation}:{state.seq}"
    since = state.watermark or _first_count(using, state) or pending.now
    span: dict[str, Any] = {"since": since, "until": pending.now, "fsync": fsync}
    if _is_wiped(state, pending):
        if not state.incarnation:
            # The same text also if the loss is noticed before the first seal after it, and again after this seal.
            event = f"{state.shard}:after {max(state.watermark, state.first_sealed)}"
            state.first_sealed = pending.first_sealed or state.first_sealed
        declare(using, GapKind.WIPE, event, shard=state.shard, detail=_WIPED, **span)
        # Reset the state to the state of a shard without a batch: the server's next batch has a new incarnation.
        state.incarnation, state.seq, state.cum = "", 0, 0
    elif _is_rolled_back(state, pending):
        detail = f"the server's newest batch is {pending.seq}, the ledger's is {state.seq}"
        declare(using, GapKind.ROLLBACK, event, shard=state.shard, detail=detail, **span)
    elif first := _first_lost(using, state, pending):
        _declare_lost(using, state, pending.incarnation, first, pending.seq, **span)


def _first_count(using: str, state: ShardState) -> int:
    """Return a moment before which nothing was counted in a shard without a watermark (µs since 1970 UTC).

    It is the start of the first bin in which a process has counted requests, or the shard's first seal. Return 0 if
    neither is known.
    """
    bins = ProcessTotal.objects.using(using).filter(kind="admitted").aggregate(first=Min("bin"))
    known = [at for at in ((bins["first"] or 0) * 1_000_000, state.first_sealed) if at]
    return min(known, default=0)


def declare_lost_batch(using: str, state: ShardState, incarnation: str, seq: int, *, until: int) -> None:
    """Declare that a listed batch disappeared from Redis before it was applied."""
    _declare_lost(using, state, incarnation, seq, seq, since=state.watermark or until, until=until)


def _declare_lost(using: str, state: ShardState, incarnation: str, first: int, last: int, **span: Any) -> None:
    """Declare batches missing. Note in the shard's state that the last missing batch is the newest batch."""
    declare_missing(using, state, incarnation, first, last, **span)
    if incarnation != state.incarnation:
        state.incarnation, state.seq, state.cum = incarnation, last, 0
    state.seq = max(state.seq, last)


def declare_gaps_before(
    using: str, state: ShardState, packet: Packet, fsync: str, live_runs: Mapping[str, LiveRun] | None = None
) -> int:
    """Declare the gaps between the newest batch in the ledger and the next batch, `packet`.

    Return how many gaps were declared. This number does not include the gap of a restart. `live_runs` are the runs of
    the servers that answer now. If the shard's last run is among them, no restart is declared: the shard was only moved
    to another node.
    """
    live_runs = live_runs or {}
    if state.run and packet.sealed_run != state.run and state.run not in live_runs:
        # If one run opened and sealed the batch, the server had restarted before. Otherwise the server restarted while
        # the batch was open.
        until = packet.opened_at if packet.run == packet.sealed_run else packet.sealed_at
        declare_restart(using, state, packet.sealed_run, until=until, fsync=fsync, live_runs=live_runs)
    span: dict[str, Any] = {
        "since": state.watermark or packet.opened_at,
        "until": max(packet.opened_at, state.watermark),
        "fsync": fsync,
    }
    if packet.incarnation == state.incarnation:
        count = 0
        # What was counted after the newest batch in the ledger, and before `packet`: requests and units together.
        difference = (packet.previous_cum - state.cum) % CUM_MODULUS
        lost = _requests_and_units(using, packet, difference) if difference else _NOTHING
        if packet.seq > state.seq + 1:
            count += declare_missing(using, state, packet.incarnation, state.seq + 1, packet.seq - 1, **lost, **span)
        elif difference and not _add_to_previous_gap(using, state, lost):
            count += declare(
                using,
                GapKind.SUM,
                f"{state.shard}:{packet.incarnation}:{packet.seq}",
                shard=state.shard,
                detail=f"the running sum was {state.cum} in the ledger and {packet.previous_cum} in the batch",
                **span,
            )
        return count
    return _declare_gaps_between_incarnations(using, state, packet, span)


def _requests_and_units(using: str, packet: Packet, difference: int) -> dict[str, int]:
    """Return how many requests and how many units were counted between the newest batch in the ledger and `packet`.

    `difference` is both together. The batch and `packet` have the same incarnation. Return {} if the batch was moved to
    an archive: then the running sum of its requests is not known.
    """
    rows = Batch.objects.using(using).filter(
        shard=packet.shard, incarnation=packet.incarnation, first_seq__lt=packet.seq
    )
    newest = rows.order_by("-seq").first()
    before = 0
    if newest is not None:
        sums = newest.lines().aggregate(**{name: ExactSum(name) for name in _REQUESTS})
        before = newest.previous_requests + sum(total or 0 for total in sums.values())
    elif ArchivedRange.objects.using(using).filter(shard=packet.shard, incarnation=packet.incarnation).exists():
        return {}
    requests = (packet.previous_requests - before) % CUM_MODULUS
    return {"requests": requests, "units": (difference - requests) % CUM_MODULUS}


def _add_to_previous_gap(using: str, state: ShardState, lost: Mapping[str, int]) -> int:
    """Find the gap that declares the previous batch missing, and store there how many requests and units are lost.

    Return how many gaps were changed: 0 if there is no such gap. When the gap was declared, nobody knew the numbers.
    """
    missing = DurabilityGap.objects.using(using).filter(kind=GapKind.MISSING, shard=state.shard, units=None)
    return change(using, missing.filter(incarnation=state.incarnation, last_seq=state.seq), **lost)


def _declare_gaps_between_incarnations(using: str, state: ShardState, packet: Packet, span: dict[str, Any]) -> int:
    """Declare the gaps before a batch, if the newest batch in the ledger has another incarnation.

    Return how many gaps were declared.
    """
    count = 0
    follows_incarnation, _colon, number = packet.follows.rpartition(":")
    event = f"{state.shard}:{state.incarnation}:{state.seq}"
    details: dict[str, Any] = {"shard": state.shard, **span}
    if not state.incarnation:
        pass  # The ledger has no batch of the shard yet, or a gap already declares that the server lost its data.
    elif not packet.follows:
        count += declare(using, GapKind.WIPE, event, detail=_WIPED, **details)
    elif follows_incarnation != state.incarnation:
        detail = f"no batch of the incarnation in between was drained: {packet.follows}"
        count += declare(using, GapKind.INCARNATION, event, detail=detail, **details)
    elif int(number) > state.seq:
        count += declare_missing(using, state, follows_incarnation, state.seq + 1, int(number), **span)
    elif int(number) < state.seq:
        detail = f"the server's newest batch was {number}, the ledger's is {state.seq}"
        count += declare(using, GapKind.ROLLBACK, event, detail=detail, **details)
    rows = Batch.objects.using(using).filter(shard=packet.shard, incarnation=packet.incarnation).order_by("-seq")
    # The number and the running sum of the newest batch in the ledger that has the packet's incarnation. Both are 0 if
    # there is no such batch.
    seq, cum = (rows.values_list("seq", "cum").first() if packet.seq > 1 else None) or (0, 0)
    if packet.seq > seq + 1:
        difference = (packet.previous_cum - cum) % CUM_MODULUS
        lost = _requests_and_units(using, packet, difference) if difference else _NOTHING
        count += declare_missing(using, state, packet.incarnation, seq + 1, packet.seq - 1, **lost, **span)
    return count
