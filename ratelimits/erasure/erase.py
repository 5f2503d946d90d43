"""Erase a customer in one transaction: all tables, and the archive files.

After a crash at any step, nothing has changed but files: an erasure writes a new archive file beside each old one, and
deletes the old ones after the commit. The next erasure with these archives deletes what is left.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from django.db import connections, transaction
from django.db.models import F
from django.utils.translation import gettext as _

from ratelimits.conf import conf
from ratelimits.engine.keys import account_shard
from ratelimits.erasure import bills, configuration, traces, usage
from ratelimits.erasure.about import About
from ratelimits.models import (
    ArchivedRange,
    Customer,
    Line,
    PeriodUsage,
    ProcessTotal,
    PushDelivery,
    Report,
    ReportLine,
    ShardState,
)
from ratelimits.models.accounts import ReferredError, refuse_references
from ratelimits.models.history import MAX_REASON
from ratelimits.models.periods import lock
from ratelimits.usage import crash
from ratelimits.usage.retention import archive
from ratelimits.usage.retention.erase import NotErasedError, delete_replaced, erase_archive, erase_lines


@dataclass(frozen=True, slots=True)
class ErasurePreview:
    """What an erasure of a customer will replace, and what it needs.

    texts      the customer's account texts
    rows       how many rows have its names, by what they are
    archives   the archives that perhaps have its usage: they must be given
    obstacle   why the customer cannot be erased now; "" if it can
    """

    customer: Customer
    texts: list[str]
    rows: dict[str, int]
    archives: list[str]
    obstacle: str


@dataclass(frozen=True, slots=True)
class Erasure:
    """What an erasure has replaced.

    why       why the customer was erased, as a person wrote it, with pseudonyms in place of names
    rows      how many rows were replaced, by what they are
    archives  the archive files that were written again
    """

    customer: Customer
    why: str
    rows: dict[str, int]
    archives: list[Path] = field(default_factory=list)


def preview(customer: Customer) -> ErasurePreview:
    """Return what an erasure of a customer will replace. This changes nothing."""
    using = conf.DATABASE
    about = About(using, customer)
    reports = Report.objects.using(using).filter(customer=customer)
    changed = configuration.rows_of(about)
    named: dict[str, Set[Any]] = {
        "durabilitygap": {row.pk for row in usage.gaps_of(about)},
        "quarantinedbatch": {row.pk for row, _fields, _reason in usage.quarantined_of(about)},
        "adjustment": {row.pk for row in about.adjustments()},
        "report": set(reports.values_list("pk", flat=True)),
        "alert": {row.pk for row in traces.alerts_of(about)},
        "keyreset": {row.pk for row in traces.resets_of(about)},
        "move": {row.pk for row in traces.moves_of(about)},
    }
    rows = {
        _("ledger lines"): Line.objects.using(using).filter(about.names.within()).count(),
        _("report lines"): ReportLine.objects.using(using).filter(report__in=reports).exclude(key="").count(),
        _("recorded requests"): sum(map(len, traces.recorded_of(about))),
        _("totals"): usage.totals_of(about),
        _("process totals"): ProcessTotal.objects.using(using).filter(about.names.within()).count(),
        _("records of edits"): sum(map(len, changed.values())),
        _("log entries"): traces.erase_log(about, {**changed, **named}, count_only=True),
        _("reports"): len(named["report"]),
        _("gaps"): len(named["durabilitygap"]),
        _("quarantined batches"): len(named["quarantinedbatch"]),
        _("adjustments"): len(named["adjustment"]),
        _("alerts"): len(named["alert"]),
        _("resets"): len(named["keyreset"]),
        _("moves"): len(named["move"]),
    }
    obstacle = ""
    try:
        _require_erasable(using, customer)
    except NotErasedError as error:
        obstacle = str(error)
    return ErasurePreview(customer, about.texts, rows, _archives(using, about), obstacle)


def erase(customer: Customer, archives: Sequence[Path] = (), *, by: Any = None, why: str = "") -> Erasure:
    """Replace the names of a customer in all tables and in these archive files by pseudonyms.

    Sums, chains, digests, signatures and manifests stay valid. Nobody can find the names from the pseudonyms, since the
    salt from which they were made is deleted. The history and the admin's log say that the user `by` did this, and
    `why`, without the customer's names. Usage that Redis still has is drained later, under its names: seal and
    drain before.

    Raise NotErasedError if the customer was erased before, is anonymous usage, or has deliveries that are not settled,
    if a row of the project refers to its account by the identifier, if an archive with its usage is missing, or if a
    batch or a report does not match its digest. Raise ArchiveError if
    an archive is not the one that the ledger recorded. Then nothing has changed.
    """
    using = conf.DATABASE
    for directory in {path.parent for path in archives}:
        delete_replaced(using, directory)
    with transaction.atomic(using=using, durable=True):
        customer = _locked(using, customer)
        _require_erasable(using, customer)
        about = About(using, customer)
        written = _erase_archives(using, about, archives)
        crash.reached("erase:archives-written")
        why = about.scrub.cut(why, MAX_REASON)
        rows = _erase_tables(using, about, by, why)
        Customer.objects.using(using).filter(pk=customer.pk).update(salt="")
        traces.log_erasure(customer, by, why)
        crash.reached("erase:salt-deleted")
    crash.reached("erase:committed")
    for directory in {path.parent for path in archives}:
        delete_replaced(using, directory)
        crash.reached("erase:files-deleted")
    return Erasure(customer, why, rows, written)


def _erase_tables(using: str, about: About, by: Any, why: str) -> dict[str, int]:
    """Replace the names in all tables. Return how many rows were changed, by what they are."""
    about.read_all()
    totals = usage.ProcessTotals(about)
    rows = {_("ledger lines"): erase_lines(using, about.names)}
    crash.reached("erase:lines-written")
    gaps, quarantined = usage.erase_gaps(about), usage.erase_quarantined(about)
    adjustments = bills.erase_adjustments(about)
    reports = list(Report.objects.using(using).filter(customer=about.customer).values_list("pk", flat=True))
    rows[_("report lines")] = bills.erase_reports(about)
    crash.reached("erase:reports-written")
    alerts, resets, moves = traces.erase_alerts(about), traces.erase_resets(about), traces.erase_moves(about)
    rows[_("recorded requests")] = traces.delete_recorded(about)
    changed = configuration.erase_configuration(about, by, why)
    crash.reached("erase:configuration-written")
    rows[_("totals")] = usage.erase_totals(about)
    rows[_("process totals")] = totals.erase()
    rows[_("records of edits")] = sum(map(len, changed.values()))
    crash.reached("erase:totals-written")
    logged: dict[str, Set[Any]] = {
        **changed,
        "durabilitygap": set(gaps),
        "quarantinedbatch": set(quarantined),
        "adjustment": set(adjustments),
        "report": set(reports),
        "alert": alerts,
        "keyreset": resets,
        "move": moves,
    }
    rows[_("log entries")] = traces.erase_log(about, logged)
    return {
        **rows,
        _("reports"): len(reports),
        _("gaps"): len(gaps),
        _("quarantined batches"): len(quarantined),
        _("adjustments"): len(adjustments),
        _("alerts"): len(alerts),
        _("resets"): len(resets),
        _("moves"): len(moves),
    }


def _locked(using: str, customer: Customer) -> Customer:
    """Lock the shards with usage of a customer, then its row, until the transaction ends. Return the present row."""
    if not connections[using].features.has_select_for_update:
        # SQLite can refuse the writes of a transaction whose first statement was a read.
        Customer.objects.using(using).filter(pk=0).update(token=F("token"))
    shards: set[int] = set()
    while True:
        texts = set(customer.names.using(using).values_list("identifier", flat=True))
        totals = PeriodUsage.objects.using(using).filter(customer=customer).order_by()
        wanted = {account_shard(text, conf.SHARDS) for text in texts}
        wanted |= set(totals.values_list("shard", flat=True).distinct())
        if wanted <= shards:
            break
        ShardState.objects.using(using).bulk_create(
            [ShardState(shard=shard) for shard in sorted(wanted)], ignore_conflicts=True
        )
        ShardState.lock_all(using, wanted)
        shards |= wanted
    assert customer.pk is not None
    lock(using, [customer.pk])
    return Customer.objects.using(using).get(pk=customer.pk)


def _require_erasable(using: str, customer: Customer) -> None:
    """Raise NotErasedError if the customer cannot be erased now."""
    if not customer.salt:
        raise NotErasedError(_("This customer was erased before."))
    if customer.names.using(using).filter(identifier="").exists():
        raise NotErasedError(_("Anonymous usage has no name that could be erased."))
    try:
        names = customer.names.using(using).filter(until=None)
        refuse_references(using, set(names.values_list("identifier", flat=True)))
    except ReferredError as error:
        raise NotErasedError(str(error)) from error
    deliveries = PushDelivery.objects.using(using).filter(report__customer=customer)
    states = (PushDelivery.State.WAITING, PushDelivery.State.UNSURE)
    if (count := deliveries.filter(state__in=states).count()) > 0:
        raise NotErasedError(
            _("%(count)s lines of its reports are not settled with a billing system: push or settle them first.")
            % {"count": f"{count:,}"}
        )


def _archives(using: str, about: About) -> list[str]:
    """Return the names of the archives that perhaps have usage of the customer: those of its shards."""
    totals = PeriodUsage.objects.using(using).filter(customer=about.customer).order_by()
    ranges = ArchivedRange.objects.using(using).filter(shard__in=totals.values("shard"))
    return sorted(set(ranges.values_list("archive", flat=True)))


def _erase_archives(using: str, about: About, archives: Sequence[Path]) -> list[Path]:
    """Write the archives of the customer's shards again, without its names. Return the new files."""
    given = {path.name: path for path in archives}
    needed = _archives(using, about)
    if missing := [name for name in needed if name not in given]:
        raise NotErasedError(
            _("These archives have usage of the customer's shards, and were not given (--archive): %(names)s")
            % {"names": ", ".join(missing)}
        )
    all_ranges = ArchivedRange.all_ranges.using(using)
    in_ledger = set(all_ranges.exclude(restored_at=None).values_list("archive", flat=True)) - set(needed)
    if restored := sorted(in_ledger & given.keys()):
        raise NotErasedError(
            _(
                "These archives were restored, so their files are not needed any more, but have names: delete them"
                " first: %(names)s"
            )
            % {"names": ", ".join(restored)}
        )
    written = (erase_archive(using, given[name], about.names) for name in needed)
    return [path for path in written if path is not None]


def archives_in(directories: Sequence[Path]) -> list[Path]:
    """Return the archive files in these directories."""
    return [path for directory in directories for path in archive.files(directory)]
