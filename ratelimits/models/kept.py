"""Billing periods that outlast a change of their account's terms: what was used under them stays theirs.

A change of time zone or anchor, a new name, a deletion, and an account that is made where usage came before it, leave
the last period that has usage as it is. The periods under the new terms follow on its end, so they never overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from django.db import models
from django.db.models import Max
from django.dispatch import receiver
from django.utils.translation import gettext_lazy as _

from ratelimits.algorithms.billing_periods import Span, periods_around
from ratelimits.models.accounts import Account
from ratelimits.models.keys import key_shard
from ratelimits.models.ledger import moment
from ratelimits.models.reports import PeriodUsage
from ratelimits.models.versions import Edit, edited

_SECOND = 1_000_000
_CHUNK = 1000

#: A time zone and an anchor ("" for none).
_Months = tuple[str, str]
#: Those of a name that no account has.
_DEFAULT: _Months = ("UTC", "")


class KeptPeriod(models.Model):
    """The last used billing period of an account when its terms last changed; moments are µs since 1970 UTC."""

    account = models.CharField(_("account"), max_length=255, unique=True)
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
    every = list(names)
    return (every[first : first + _CHUNK] for first in range(0, len(every), _CHUNK))


def kept_of(using: str, names: Iterable[str]) -> dict[str, Span]:
    """Return the kept periods of these accounts, of those that have one."""
    found: dict[str, Span] = {}
    for chunk in _chunks(names):
        rows = KeptPeriod.objects.using(using).filter(account__in=chunk)
        found.update({name: (start, end) for name, start, end in rows.values_list("account", "start", "end")})
    return found


def _months(row: Account | None) -> _Months:
    return _DEFAULT if row is None else (row.timezone, row.billing_anchor)


@receiver(edited, sender=Account, dispatch_uid="ratelimits.keep_periods")
def _keep(sender: Any, before: Sequence[Account], after: Sequence[Account], edit: Edit, **kwargs: Any) -> None:
    """Keep the last used periods of the names whose months are others after an edit."""
    was, now = {row.pk: row for row in before}, {row.pk: row for row in after}
    months: dict[str, _Months] = {}
    former: dict[str, str] = {}
    for pk in was.keys() | now.keys():
        old, new = was.get(pk), now.get(pk)
        renamed = old is not None and new is not None and old.identifier != new.identifier
        if _months(old) == _months(new) and not renamed:
            continue
        if old is not None:
            months[old.identifier] = _months(old)
        if new is not None:
            months.setdefault(new.identifier, _DEFAULT)
        if renamed and old is not None and new is not None:
            former[new.identifier] = old.identifier
    for chunk in _chunks(months):
        used = _last_used(edit.using, {*chunk, *(former[name] for name in chunk if name in former)}, months)
        for name in chunk:
            span = used.get(name) or used.get(former.get(name, ""))
            if span is not None:
                values = {"start": span[0], "end": span[1], "version": edit.version}
                KeptPeriod.objects.using(edit.using).update_or_create(
                    account=name, defaults={**values, "shard": key_shard(f"account:{name}")}
                )


def _last_used(using: str, names: set[str], months: dict[str, _Months]) -> dict[str, Span]:
    """Return the period of each of these accounts that ends last, of those with usage in the ledger."""
    rows = PeriodUsage.objects.using(using).filter(account__in=names, period__gt=0).exclude(account="").order_by()
    found: dict[str, Span] = {}
    for name, start, end in rows.values_list("account", "period").annotate(Max("period_end")):
        known = end * _SECOND if end is not None else _next(months.get(name, _DEFAULT), start * _SECOND)
        if name not in found or known > found[name][1]:
            found[name] = start * _SECOND, known
    return found


def _around(months: _Months, kept: Span | None, at: int) -> Span:
    timezone, anchor = months
    try:
        return periods_around(timezone, anchor or None, kept, at)[1:3]
    except ValueError:  # as where it was counted: by months in UTC
        return periods_around("UTC", None, kept, at)[1:3]


def _next(months: _Months, start: int) -> int:
    return _around(months, None, start)[1]


def ends_of(using: str, periods: Mapping[tuple[str, int], int]) -> dict[tuple[str, int], int]:
    """Return when billing periods end, by account and start, all in seconds since 1970 UTC.

    `periods` say when each was last used. They are those of the account's terms now, or of former ones, that start then
    and had not ended when they were used. Where there is none, the period ends where the next one starts.
    """
    wanted = sorted((name, start) for name, start in periods if start)
    names = sorted({name for name, _start in wanted})
    kept, months = kept_of(using, names), dict(_months_of(using, names))
    found: dict[tuple[str, int], int] = {}
    unknown: list[tuple[str, int]] = []
    for name, start in wanted:
        used = periods[name, start]
        span = _around(months.get(name, _DEFAULT), kept.get(name), start * _SECOND)
        if span[0] != start * _SECOND or span[1] <= used * _SECOND:
            unknown.append((name, start))
            span = _around(months.get(name, _DEFAULT), kept.get(name), used * _SECOND)
        found[name, start] = span[1] // _SECOND
    former = _former(using, sorted({name for name, _start in unknown}))
    for name, start in unknown:
        for each in (*former.get(name, ()), _DEFAULT):
            begun, end = _around(each, None, start * _SECOND)
            if begun == start * _SECOND and end > periods[name, start] * _SECOND:
                found[name, start] = end // _SECOND
                break
    return found


def _months_of(using: str, names: Sequence[str]) -> Iterator[tuple[str, _Months]]:
    for chunk in _chunks(names):
        rows = Account.objects.using(using).filter(identifier__in=chunk)
        for name, *months in rows.values_list("identifier", "timezone", "billing_anchor"):
            yield name, (months[0], months[1])


def _former(using: str, names: Sequence[str]) -> dict[str, list[_Months]]:
    """Return the months that these accounts ever had, newest first."""
    found: dict[str, list[_Months]] = {}
    history: Any = Account.history
    for chunk in _chunks(names):
        records = history.using(using).filter(identifier__in=chunk).order_by("-version", "-history_id")
        for name, timezone, anchor in records.values_list("identifier", "timezone", "billing_anchor"):
            found.setdefault(name, []).append((timezone, anchor))
    return found
