"""Erase a customer in one transaction: all tables, and the archive files.

After a crash at any step, nothing has changed but files: an erasure writes a new archive file beside each old one, and
deletes the old ones after the commit. The next erasure with these archives deletes what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from django.db import connections, transaction
from django.db.models import F
from django.utils.translation import gettext as _

from ratelimits.conf import conf
from ratelimits.engine.keys import account_shard
from ratelimits.models import Customer
from ratelimits.models.accounts import ReferredError, refuse_references
from ratelimits.models.history import MAX_REASON
from ratelimits.models.periods import lock
from ratelimits.usage.erasure import configuration, traces, usage
from ratelimits.usage.erasure.about import About, Replaced, parts, replaced
from ratelimits.usage.ledger import crash
from ratelimits.usage.ledger.retention import archive
from ratelimits.usage.ledger.retention.erase import NotErasedError, delete_replaced, erase_archive, erase_lines
from ratelimits.usage.models import ArchivedRange, Line, PeriodUsage, ProcessTotal, ShardState


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
    found = [
        Replaced(_("ledger lines"), Line.objects.using(using).filter(about.names.within()).count()),
        *(one for part in parts() for one in part.preview(about)),
        Replaced(_("recorded requests"), sum(map(len, traces.recorded_of(about)))),
        Replaced(_("totals"), usage.totals_of(about)),
        Replaced(_("process totals"), ProcessTotal.objects.using(using).filter(about.names.within()).count()),
        replaced(_("gaps"), "durabilitygap", (row.pk for row in usage.gaps_of(about))),
        replaced(_("quarantined batches"), "quarantinedbatch", (row.pk for row, *_new in usage.quarantined_of(about))),
        replaced(_("alerts"), "alert", (row.pk for row in traces.alerts_of(about))),
        replaced(_("resets"), "keyreset", (row.pk for row in traces.resets_of(about))),
        replaced(_("moves"), "move", (row.pk for row in traces.moves_of(about))),
    ]
    rows = _rows(about, found, configuration.rows_of(about), count_only=True)
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
    found = [Replaced(_("ledger lines"), erase_lines(using, about.names))]
    crash.reached("erase:lines-written")
    gaps, quarantined = usage.erase_gaps(about), usage.erase_quarantined(about)
    found += [one for part in parts() for one in part.erase(about)]
    crash.reached("erase:reports-written")
    alerts, resets, moves = traces.erase_alerts(about), traces.erase_resets(about), traces.erase_moves(about)
    found.append(Replaced(_("recorded requests"), traces.delete_recorded(about)))
    changed = configuration.erase_configuration(about, by, why)
    crash.reached("erase:configuration-written")
    found.append(Replaced(_("totals"), usage.erase_totals(about)))
    found.append(Replaced(_("process totals"), totals.erase()))
    crash.reached("erase:totals-written")
    found += [
        replaced(_("gaps"), "durabilitygap", gaps),
        replaced(_("quarantined batches"), "quarantinedbatch", quarantined),
        replaced(_("alerts"), "alert", alerts),
        replaced(_("resets"), "keyreset", resets),
        replaced(_("moves"), "move", moves),
    ]
    return _rows(about, found, changed)


def _rows(
    about: About, found: Sequence[Replaced], changed: configuration.Changed, *, count_only: bool = False
) -> dict[str, int]:
    """Replace the names in the admin's log of these rows, or only count its entries. Return how many rows there are."""
    logged = {**changed, **{one.model: one.pks for one in found if one.model}}
    return {
        **{one.what: one.number for one in found},
        _("records of edits"): sum(map(len, changed.values())),
        _("log entries"): traces.erase_log(about, logged, count_only=count_only),
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
    for part in parts():
        if reason := part.obstacle(customer, using):
            raise NotErasedError(reason)


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
