"""The second witness: what processes say they saw, written beside the ledger as absolute totals.

A total is written again and again as it grows, under the name of its process; so writing is idempotent, and a process
that dies takes with it at most what it counted since the last time.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from django.db import DataError, connections, transaction
from django.db.models import F, Sum

from ratelimits.conf import conf
from ratelimits.engine.keys import ANONYMOUS, BIN_SECONDS
from ratelimits.models.ledger import DurabilityGap, GapKind, ProcessTotal, ShardState
from ratelimits.usage.gaps import note_changes

if TYPE_CHECKING:
    from ratelimits.quota.process_totals import Totals

_CHUNK = 1000
_SECOND = 1_000_000
_PLACE = ("bin", "kind", "account", "key", "meter")
#: Totals that are older (s) are added up over processes: none of them writes so late.
_FOLDED = 86_400
#: What is raised for a value that the database, or its driver, has no place for.
_REFUSED = (DataError, ValueError, OverflowError)

logger = logging.getLogger(__name__)


def write(process: str, totals: Totals) -> None:
    """Write a process's totals, and declare what may be missing from the ledger for it."""
    using = conf.DATABASE
    rows = [
        ProcessTotal(
            process=process,
            kind=total_key.kind,
            account=total_key.account,
            key=total_key.key,
            meter=total_key.meter,
            bin=total_key.bin,
            requests=requests,
            units=units,
        )
        for total_key, (requests, units) in sorted(totals.items())
    ]
    try:
        rows = _save(using, rows)
        for kind, account, start in sorted({(row.kind, row.account, row.bin) for row in rows}):
            if kind != "admitted":
                _declare(using, kind, account, start)
    finally:
        # Of this thread alone, which has no request whose end would close it.
        if not connections[using].in_atomic_block:
            connections[using].close()


def _save(using: str, rows: list[ProcessTotal]) -> list[ProcessTotal]:
    """Write the rows and return them, without those that the database refuses: one must not hold up the others."""
    try:
        with transaction.atomic(using=using):
            type(rows[0]).objects.using(using).bulk_create(
                rows,
                batch_size=_CHUNK,
                update_conflicts=True,
                unique_fields=[*_PLACE, "process"],
                update_fields=["requests", "units"],
            )
    except _REFUSED as error:
        if len(rows) == 1:
            logger.error("A total of this process cannot be kept by the database: %s: %s", error, _told(rows[0]))
            return []
        half = len(rows) // 2
        return _save(using, rows[:half]) + _save(using, rows[half:])
    return rows


def _told(row: ProcessTotal) -> str:
    return ascii({name: getattr(row, name) for name in (*_PLACE, "requests", "units")})


def _declare(using: str, kind: str, account: str, start: int) -> None:
    name = account or ANONYMOUS
    gap = GapKind.UNKNOWN if kind == "unanswered" else GapKind.UNMETERED
    new = DurabilityGap(
        event=f"{gap}:{name}:{start}",
        kind=gap,
        account=name,
        since=start * _SECOND,
        until=(start + BIN_SECONDS) * _SECOND - 1,
        units=0,
    )
    gaps = DurabilityGap.objects.using(using)
    with transaction.atomic(using=using):
        gaps.bulk_create([new], ignore_conflicts=True)
        declared = gaps.filter(event=new.event)
        # Processes wait for each other here: the last one to add up sees what all have written.
        declared.update(units=F("units"))
        rows = ProcessTotal.objects.using(using).filter(kind=kind, account=account, bin=start)
        sums = rows.aggregate(requests=Sum("requests"), units=Sum("units"))
        declared.update(units=sums["units"], detail=f"{sums['requests']} requests")
        note_changes(using, declared.values_list("pk", flat=True))


def fold(now: int) -> int:
    """Add the totals of what was admitted up over processes, where none writes any more; how many rows became fewer.

    `now` is seconds since 1970 UTC.
    """
    using, count = conf.DATABASE, 0
    old = ProcessTotal.objects.using(using).filter(kind="admitted", bin__lt=now - _FOLDED).exclude(process="")
    first = ShardState.objects.using(using).order_by("shard").values_list("shard", flat=True).first()
    for start in list(old.order_by("bin").values_list("bin", flat=True).distinct()):
        with transaction.atomic(using=using, durable=True):
            if first is not None:
                ShardState.lock(using, first)  # one at a time
            every = ProcessTotal.objects.using(using).filter(kind="admitted", bin=start)
            sums = list(every.values(*_PLACE).order_by().annotate(total=Sum("requests"), units_=Sum("units")))
            count += every.count() - len(sums)
            every._raw_delete(using)
            ProcessTotal.objects.using(using).bulk_create(
                [ProcessTotal(process="", requests=row.pop("total"), units=row.pop("units_"), **row) for row in sums],
                batch_size=_CHUNK,
            )
    return count
