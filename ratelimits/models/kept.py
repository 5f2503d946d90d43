"""Billing periods that keep their start and end when their account changes.

The *terms* of an account are its time zone and its billing anchor. They determine when the account's billing periods
start and end. When the terms change, the account's latest period with usage keeps its start and end. This period is
called the *kept period*. The next period, under the new terms, starts at the end of the kept period. So billing periods
never overlap.

A period is also kept when the account is renamed. An identifier that is not in the table of accounts has the terms UTC
and calendar months. So the terms can also change when an account is added to the table, or deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from django.db import models
from django.db.models import Max
from django.dispatch import receiver
from django.utils.translation import gettext_lazy as _

from ratelimits.algorithms.billing_periods import Span, periods_around
from ratelimits.engine.keys import LONGEST_NAME
from ratelimits.models.accounts import Account
from ratelimits.models.keys import key_shard
from ratelimits.models.ledger import moment
from ratelimits.models.reports import PeriodUsage
from ratelimits.models.versions import Edit, edited

_SECOND = 1_000_000
#: Maximum number of accounts that one query names.
_CHUNK = 1000

#: The terms of an account: its time zone and its billing anchor ("" if it has none).
_Terms = tuple[str, str]
#: The terms of an account without a row in the table of accounts.
_DEFAULT_TERMS: _Terms = ("UTC", "")


class KeptPeriod(models.Model):
    """The latest kept period of an account. An account has at most one row.

    Moments are in µs since 1970 UTC.
    """

    account = models.CharField(_("account"), max_length=LONGEST_NAME, unique=True)
    shard = models.SmallIntegerField(_("shard"), db_index=True)
    start = models.BigIntegerField(_("start (µs)"))
    end = models.BigIntegerField(_("end (µs)"))
    version = models.BigIntegerField(_("version"), db_index=True)

    class Meta:
        verbose_name = _("kept billing period")
        verbose_name_plural = _("kept billing periods")

    def __str__(self) -> str:
        return f"{self.account} {moment(self.start):%Y-%m-%d} – {moment(self.end):%Y-%m-%d}"


def _chunks(names: Iterable[str]) -> Iterator[list[str]]:
    all_names = list(names)
    return (all_names[first : first + _CHUNK] for first in range(0, len(all_names), _CHUNK))


def kept_periods(using: str, names: Iterable[str]) -> dict[str, Span]:
    """Return the kept periods of these accounts, by account. Leave out accounts without a kept period."""
    periods: dict[str, Span] = {}
    for chunk in _chunks(names):
        rows = KeptPeriod.objects.using(using).filter(account__in=chunk)
        periods.update({name: (start, end) for name, start, end in rows.values_list("account", "start", "end")})
    return periods


def _terms(row: Account | None) -> _Terms:
    return _DEFAULT_TERMS if row is None else (row.timezone, row.billing_anchor)


@receiver(edited, sender=Account, dispatch_uid="ratelimits.keep_periods")
def _keep_periods(sender: Any, before: Sequence[Account], after: Sequence[Account], edit: Edit, **kwargs: Any) -> None:
    """Keep the latest period with usage of each account whose terms or identifier change in an edit."""
    old_rows, new_rows = {row.pk: row for row in before}, {row.pk: row for row in after}
    #: The terms before the edit, by account.
    old_terms: dict[str, _Terms] = {}
    #: The identifier before the edit, by the new identifier.
    old_names: dict[str, str] = {}
    for pk in old_rows.keys() | new_rows.keys():
        old, new = old_rows.get(pk), new_rows.get(pk)
        renamed = old is not None and new is not None and old.identifier != new.identifier
        if _terms(old) == _terms(new) and not renamed:
            continue
        if old is not None:
            old_terms[old.identifier] = _terms(old)
        if new is not None:
            old_terms.setdefault(new.identifier, _DEFAULT_TERMS)
        if renamed and old is not None and new is not None:
            old_names[new.identifier] = old.identifier
    for chunk in _chunks(old_terms):
        names = {*chunk, *(old_names[name] for name in chunk if name in old_names)}
        latest_periods = _latest_periods(edit.using, names, old_terms)
        for name in chunk:
            # If a new name has no usage yet, it keeps the latest period of the old name.
            span = latest_periods.get(name) or latest_periods.get(old_names.get(name, ""))
            if span is not None:
                start, end = span
                values = {"start": start, "end": end, "version": edit.version}
                KeptPeriod.objects.using(edit.using).update_or_create(
                    account=name, defaults={**values, "shard": key_shard(f"account:{name}")}
                )


def _latest_periods(using: str, names: set[str], terms: dict[str, _Terms]) -> dict[str, Span]:
    """Return, by account, the period with usage that ends last. Leave out accounts without usage in the ledger."""
    rows = PeriodUsage.objects.using(using).filter(account__in=names, period__gt=0).exclude(account="").order_by()
    latest: dict[str, Span] = {}
    for name, start, stored_end in rows.values_list("account", "period").annotate(Max("period_end")):
        if stored_end is not None:
            end = stored_end * _SECOND
        else:  # The row is older than the column `period_end`.
            _start, end = _period(terms.get(name, _DEFAULT_TERMS), None, start * _SECOND)
        _latest_start, latest_end = latest.get(name, (0, 0))
        if end > latest_end:
            latest[name] = start * _SECOND, end
    return latest


def _period(terms: _Terms, kept: Span | None, at: int) -> Span:
    """Return the start and the end of the billing period that contains the moment `at`, in µs since 1970 UTC."""
    timezone, anchor = terms
    # The second and the third moment of `periods_around` are the start and the end of the period that contains `at`.
    try:
        return periods_around(timezone, anchor or None, kept, at)[1:3]
    except ValueError:  # An account with invalid terms has calendar months in UTC.
        return periods_around("UTC", None, kept, at)[1:3]


def period_ends(using: str, last_uses: Mapping[tuple[str, int], int]) -> dict[tuple[str, int], int]:
    """Return the end of each billing period of `last_uses`, by account and start. Moments are in s since 1970 UTC.

    `last_uses` gives the moment of the last use in each period, by account and start of the period. Perhaps a period
    started under terms that the account no longer has. So try the present terms, then the former terms, then the
    default terms. Terms are right if a period under them has the given start and ends after the last use. If no terms
    are right, use the present terms, and return the end of the period that contains the last use.
    """
    periods = sorted((name, start) for name, start in last_uses if start)
    names = sorted({name for name, _start in periods})
    kept, terms = kept_periods(using, names), dict(_present_terms(using, names))
    ends: dict[tuple[str, int], int] = {}
    not_of_present_terms: list[tuple[str, int]] = []
    for name, start in periods:
        last_use = last_uses[name, start]
        present_terms = terms.get(name, _DEFAULT_TERMS)
        period_start, period_end = _period(present_terms, kept.get(name), start * _SECOND)
        if period_start != start * _SECOND or period_end <= last_use * _SECOND:
            not_of_present_terms.append((name, start))
            _start, period_end = _period(present_terms, kept.get(name), last_use * _SECOND)
        ends[name, start] = period_end // _SECOND
    former_terms = _former_terms(using, sorted({name for name, _start in not_of_present_terms}))
    for name, start in not_of_present_terms:
        for possible_terms in (*former_terms.get(name, ()), _DEFAULT_TERMS):
            period_start, period_end = _period(possible_terms, None, start * _SECOND)
            if period_start == start * _SECOND and period_end > last_uses[name, start] * _SECOND:
                ends[name, start] = period_end // _SECOND
                break
    return ends


def _present_terms(using: str, names: Sequence[str]) -> Iterator[tuple[str, _Terms]]:
    for chunk in _chunks(names):
        rows = Account.objects.using(using).filter(identifier__in=chunk)
        for name, timezone, anchor in rows.values_list("identifier", "timezone", "billing_anchor"):
            yield name, (timezone, anchor)


def _former_terms(using: str, names: Sequence[str]) -> dict[str, list[_Terms]]:
    """Return all terms that these accounts have had, by account, newest first."""
    terms: dict[str, list[_Terms]] = {}
    history: Any = Account.history
    for chunk in _chunks(names):
        records = history.using(using).filter(identifier__in=chunk).order_by("-version", "-history_id")
        for name, timezone, anchor in records.values_list("identifier", "timezone", "billing_anchor"):
            terms.setdefault(name, []).append((timezone, anchor))
    return terms
