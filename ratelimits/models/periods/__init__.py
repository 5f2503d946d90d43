"""Frozen billing periods: once a billing period is used, it keeps its start, its end, its time zone and its month.

A row is written for a period with usage (by the tally), with an adjustment, or that was closed by force. An edit of a
customer's *terms*, which are the time zone and the billing anchor, first freezes all periods from the customer's first
row to the present one. Then the new terms say where later periods begin. Rows are never changed and never deleted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf
from typing import Any, NamedTuple

from django.db import connections, models, transaction
from django.db.models import F
from django.dispatch import receiver
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ratelimits import moments
from ratelimits.algorithms.billing_periods import Frozen, Period, Timeline, period_name
from ratelimits.models.accounts import Account, IdentifierEditedError
from ratelimits.models.accounts.named import NamedCustomer, named_now
from ratelimits.models.customers import (
    Customer,
    DatedName,
    Name,
    TextAndBin,
    customer_at,
    customers_of_rows,
    make_missing,
    names_of,
    waiting_text,
)
from ratelimits.models.keys import key_shard
from ratelimits.models.versions import Edit, edited

_SECOND = 1_000_000
#: Maximum number of accounts that one query names.
_CHUNK = 1000
#: Two periods of an account are not longer than this (µs). So older periods are neither the present one nor the one
#: before it.
_RECENT = 80 * 86_400 * _SECOND
#: The terms of an account: its time zone and its billing anchor ("" if it has none).
_Terms = tuple[str, str]
#: The terms of an account without a row in the table of accounts.
_DEFAULT_TERMS: _Terms = ("UTC", "")


class FrozenPeriod(models.Model):
    """A billing period that is used. The row never changes. Moments are in µs since 1970 UTC."""

    customer = models.ForeignKey(
        Customer, models.PROTECT, related_name="periods", db_index=False, verbose_name=_("customer")
    )
    start = models.BigIntegerField(_("start (µs)"))
    end = models.BigIntegerField(_("end (µs)"))
    timezone = models.CharField(_("time zone"), max_length=64)
    #: The month of the period's last moment in its time zone, such as "2026-11".
    label = models.CharField(_("month"), max_length=7)

    class Meta:
        verbose_name = _("billing period")
        verbose_name_plural = _("billing periods")
        default_permissions = ()
        constraints = [models.UniqueConstraint(fields=["customer", "start"], name="ratelimits_period_of_customer")]
        indexes = [models.Index(fields=["label"], name="ratelimits_period_label")]

    def __str__(self) -> str:
        return period_name(self.label, self.start, self.timezone)


#: The columns of a `Period`.
COLUMNS = ("start", "end", "timezone", "label")


def _chunks(items: Iterable[Any]) -> Iterator[list[Any]]:
    all_items = sorted(items)
    return (all_items[first : first + _CHUNK] for first in range(0, len(all_items), _CHUNK))


def frozen_periods(using: str, customers: Iterable[int], **filters: Any) -> dict[int, list[Period]]:
    """Return the frozen periods of these customers, by primary key of the customer."""
    found: dict[int, list[Period]] = {}
    for chunk in _chunks(customers):
        rows = FrozenPeriod.objects.using(using).filter(customer__pk__in=chunk, **filters)
        for customer, *columns in rows.values_list("customer", *COLUMNS):
            found.setdefault(customer, []).append(Period(*columns))
    return found


class _Row(NamedTuple):
    """A row in the table of accounts. The primary key of an unsaved row is larger than all others."""

    pk: float
    identifier: str
    terms: _Terms


def _rows_of(using: str, customers: Collection[int]) -> dict[int, list[_Row]]:
    """Return the rows in the table of accounts that are about each customer: about its texts, or waiting for a text."""
    found: dict[int, list[_Row]] = {}
    for chunk in _chunks(customers):
        names = Name.objects.using(using).filter(customer__in=chunk, until=None)
        customer_of = dict(names.values_list("identifier", "customer"))
        if waiting := set(chunk) - set(customer_of.values()):
            for customer in Customer.objects.using(using).filter(pk__in=waiting).defer("salt"):
                assert customer.pk is not None
                customer_of[waiting_text(customer)] = customer.pk
        for texts in _chunks(customer_of):
            rows = Account.objects.using(using).filter(identifier__in=texts)
            for pk, text, zone, anchor in rows.values_list("pk", "identifier", "timezone", "billing_anchor"):
                found.setdefault(customer_of[text], []).append(_Row(pk, text, (zone, anchor)))
    return found


def _terms_in_force(rows: Iterable[_Row]) -> _Terms:
    """Return the terms of a customer with these rows: one or none, or several that raw SQL wrote: the oldest holds."""
    oldest = min(rows, default=None)
    return _DEFAULT_TERMS if oldest is None else oldest.terms


def customer_timelines(using: str, customers: Collection[int]) -> dict[int, Timeline]:
    """Return all billing periods of these customers, by primary key."""
    frozen, rows = frozen_periods(using, customers), _rows_of(using, customers)
    return {pk: Timeline(*_terms_in_force(rows.get(pk, ())), frozen.get(pk, ())) for pk in customers}


def timelines_of(using: str, customers: Iterable[NamedCustomer]) -> dict[str, Timeline]:
    """Return all billing periods of these customers, by token. Nothing is written."""
    saved: dict[int, str] = {}
    new: dict[str, str] = {}
    for customer in customers:
        if customer.pk is None:
            new[customer.account] = customer.token
        else:
            saved[customer.pk] = customer.token
    found = {saved[pk]: timeline for pk, timeline in customer_timelines(using, saved.keys()).items()}
    found |= {token: Timeline() for token in new.values()}
    for texts in _chunks(new):
        rows = Account.objects.using(using).filter(identifier__in=texts)
        for text, zone, anchor in rows.values_list("identifier", "timezone", "billing_anchor"):
            found[new[text]] = Timeline(zone, anchor)
    return found


def timeline_of(using: str, account: str) -> Timeline:
    """Return all billing periods of the customer whom an account text names now. Nothing is written."""
    customer = named_now(using, [account])[account]
    return timelines_of(using, [customer])[customer.token]


def last_frozen(
    using: str,
    shards: Collection[int],
    keys: Collection[str] | None,
    terms: Mapping[str, tuple[str, str | None]],
    now: int,
) -> Iterator[tuple[int, str, Frozen]]:
    """Yield the shard (of the configuration) and the key of accounts, each with the periods `frozen` of PeriodTerms.

    If `keys` is None, yield those of all accounts of these shards that have such periods. Otherwise yield those of
    `keys`, also without such periods. `terms` are the terms of accounts with a row. `now` is in µs since 1970 UTC.
    """
    texts = None if keys is None else sorted(key.removeprefix("account:") for key in keys)
    found: dict[str, list[Period]] = {key: [] for key in keys or ()}
    for chunk in [None] if texts is None else _chunks(texts):
        rows = FrozenPeriod.objects.using(using).filter(
            end__gt=now - _RECENT,
            customer__names__until=None,
            **({"customer__names__shard__in": shards} if chunk is None else {"customer__names__identifier__in": chunk}),
        )
        for text, *columns in rows.values_list("customer__names__identifier", *COLUMNS).iterator(_CHUNK):
            found.setdefault(f"account:{text}", []).append(Period(*columns))
    for key, periods in found.items():
        frozen = Timeline(*terms.get(key, _DEFAULT_TERMS), periods).terms().frozen
        if frozen or keys is not None:
            yield key_shard(key), key, frozen


class UsedPeriod(NamedTuple):
    """The customer (its primary key) to whom the usage of a text at a bin belongs, and its billing period."""

    customer: int
    period: Period


#: The primary key of a customer, and the start of a bin (s since 1970 UTC).
CustomerAndBin = tuple[int, int]
#: An account text, and the first and the last bin of some of its usage (s since 1970 UTC).
TextAndBins = tuple[str, int, int]


def frozen_around(using: str, spans: Collection[TextAndBins]) -> dict[TextAndBins, UsedPeriod]:
    """Return the customer and the frozen billing period to which all usage of a text from bin to bin belongs.

    Leave out spans with usage that can belong to several customers or periods, or to a period that is not frozen yet.
    """
    names = names_of(using, {text for text, _first, _last in spans})
    customers: dict[TextAndBins, int] = {}
    for text, first, last in spans:
        dated = names.get(text, ())
        if dated and not any(first < name.since <= last for name in dated):
            customers[text, first, last] = _customer_at(dated, first)
    if not customers:
        return {}
    bounds = min(first for _text, first, _last in customers), max(last for _text, _first, last in customers)
    frozen = frozen_periods(using, set(customers.values()), start__lte=bounds[1] * _SECOND, end__gt=bounds[0] * _SECOND)
    return {
        span: UsedPeriod(customer, period)
        for span, customer in customers.items()
        for period in frozen.get(customer, ())
        if period.start <= span[1] * _SECOND and span[2] * _SECOND < period.end
    }


def freeze(using: str, uses: Collection[TextAndBin]) -> dict[TextAndBin, UsedPeriod]:
    """Return the customer and the billing period of each account text at a bin (s since 1970 UTC).

    Freeze the periods that are not frozen yet. Call this in a transaction, after the locks of shards were taken.
    """
    texts = {text for text, _bin in uses}
    make_missing(using, texts)
    names = names_of(using, texts)
    customers = {(text, bin_): _customer_at(names[text], bin_) for text, bin_ in uses}
    periods = freeze_of_customers(using, {(customer, bin_) for (_text, bin_), customer in customers.items()})
    return {use: UsedPeriod(customer, periods[customer, use[1]]) for use, customer in customers.items()}


def freeze_of_customers(using: str, uses: Collection[CustomerAndBin]) -> dict[CustomerAndBin, Period]:
    """Return the billing period of each customer at a bin, as `freeze` does for account texts."""
    found = _contained(using, uses)
    if missing := sorted(use for use in uses if use not in found):
        pks = {customer for customer, _bin in missing}
        lock(using, pks)
        of_customers = customer_timelines(using, pks)
        new: list[FrozenPeriod] = []
        for customer, bin_ in missing:
            timeline = of_customers[customer]
            period = found[customer, bin_] = timeline.at(bin_ * _SECOND)
            if not timeline.is_frozen(period):
                timeline.freeze(period)
                new.append(_frozen_row(customer, period))
        FrozenPeriod.objects.using(using).bulk_create(new)
    return found


def _customer_at(names: Sequence[DatedName], bin_: int) -> int:
    # A text has a customer at each bin since 1970, unless raw SQL has deleted the first name: then take the oldest.
    return customer_at(names, bin_) or names[0].customer


def _contained(using: str, uses: Collection[CustomerAndBin]) -> dict[CustomerAndBin, Period]:
    """Return the frozen period of each use that is in one."""
    if not uses:
        return {}
    bins = [bin_ * _SECOND for _customer, bin_ in uses]
    customers = {customer for customer, _bin in uses}
    frozen = frozen_periods(using, customers, start__lte=max(bins), end__gt=min(bins))
    return {
        (customer, bin_): period
        for customer, bin_ in uses
        for period in frozen.get(customer, ())
        if period.start <= bin_ * _SECOND < period.end
    }


def _frozen_row(customer: int, period: Period) -> FrozenPeriod:
    return FrozenPeriod(customer_id=customer, **{name: getattr(period, name) for name in COLUMNS})


def lock(using: str, customers: Iterable[int]) -> None:
    """Lock the rows of these customers until the transaction ends. Only who holds the lock may freeze periods, or
    change the texts of these customers.

    SQLite has one lock for all writes, which the caller holds: the transaction began with a write.
    """
    if connections[using].features.has_select_for_update:
        for chunk in _chunks(customers):
            list(
                Customer.objects.using(using).filter(pk__in=chunk).select_for_update().order_by("pk").values_list("pk")
            )


def freeze_one(using: str, customer: int, start: int) -> Period:
    """Return the billing period of a customer at a moment (µs since 1970 UTC). Freeze it if it is not frozen yet.

    `customer` is the primary key of the customer.
    """
    use = customer, start // _SECOND
    with transaction.atomic(using=using):
        if not connections[using].features.has_select_for_update:
            # SQLite can refuse the writes of a transaction whose first statement was a read.
            Customer.objects.using(using).filter(pk=0).update(token=F("token"))
        return freeze_of_customers(using, [use])[use]


_keeping_terms: ContextVar[bool] = ContextVar("ratelimits_keeping_terms", default=False)


@contextmanager
def keeping_terms() -> Iterator[None]:
    """Let edits of the table of accounts freeze nothing: they only write the same terms of a customer to another row.

    Such an edit may also give a row the text that its customer has got.

    The customers must be locked, and their names written already.
    """
    token = _keeping_terms.set(True)
    try:
        yield
    finally:
        _keeping_terms.reset(token)


@receiver(edited, sender=Account, dispatch_uid="ratelimits.freeze_periods")
def _freeze_periods(
    sender: Any, before: Sequence[Account], after: Sequence[Account], edit: Edit, **kwargs: Any
) -> None:
    """Freeze the periods until now of each customer whose terms an edit changes."""
    if _keeping_terms.get():
        return
    old, new = _edited_rows(before), _edited_rows(after)
    stored = {row.pk: row.identifier for row in old}
    for row in new:
        if row.identifier != stored.get(row.pk, row.identifier):
            raise IdentifierEditedError(stored[row.pk])
    terms = {row.identifier: row.terms for row in new}
    changed = {row.identifier for row in old if terms.get(row.identifier) != row.terms}
    changed |= terms.keys() - {row.identifier for row in old}
    pks = set(customers_of_rows(edit.using, changed).values())
    lock(edit.using, pks)
    rows = _rows_of(edit.using, pks)
    written = {row.pk for row in (*old, *new)}
    # Other rows of these customers are perhaps written too, with the same terms as before.
    customers = customers_of_rows(edit.using, {row.identifier for row in (*old, *new)}) if pks else {}
    frozen: dict[int, _Terms] = {}
    for pk in pks:
        unchanged = [row for row in rows.get(pk, ()) if row.pk not in written]
        own = {text for text, customer in customers.items() if customer == pk}
        was = _terms_in_force([*unchanged, *(row for row in old if row.identifier in own)])
        if was != _terms_in_force([*unchanged, *(row for row in new if row.identifier in own)]):
            frozen[pk] = was
    for chunk in _chunks(frozen):
        _freeze_until(edit.since, edit.using, {pk: frozen[pk] for pk in chunk})


def _edited_rows(rows: Iterable[Account]) -> list[_Row]:
    # An unsaved row has the identifier as it was typed: `derive` returns it as requests have it.
    return [
        _Row(
            inf if row._state.adding else row.pk,
            Account.derive({"identifier": row.identifier})["identifier"],
            (row.timezone, row.billing_anchor),
        )
        for row in rows
    ]


def _freeze_until(now: int, using: str, customers: Mapping[int, _Terms]) -> None:
    """Freeze all periods from each customer's first row to the one at `now` (µs since 1970 UTC), by these terms."""
    frozen = frozen_periods(using, customers)
    new = [
        _frozen_row(pk, period)
        for pk, periods in frozen.items()
        for period in Timeline(*customers[pk], periods).freeze_until(now)
    ]
    FrozenPeriod.objects.using(using).bulk_create(new, batch_size=_CHUNK)


def periods_after(using: str, rows: Sequence[Account]) -> dict[str, list[str]]:
    """Return sentences about the billing periods that unsaved rows will give when they are saved, by identifier.

    Leave out rows that change no terms, and new rows of customers without usage: nobody has seen their periods.
    Nothing is written.
    """
    edited = {row.identifier: (row, new) for row, new in zip(rows, _edited_rows(rows), strict=True)}
    customers = named_now(using, {new.identifier for _saved, new in edited.values()})
    timelines = timelines_of(using, customers.values())
    stored = _rows_of(using, {customer.pk for customer in customers.values() if customer.pk is not None})
    found: dict[str, list[str]] = {}
    for text, (row, new) in edited.items():
        customer = customers[new.identifier]
        before = timelines[customer.token]
        if row._state.adding and not before.frozen:
            continue
        # Perhaps another row of the customer has its terms.
        others = [other for other in stored.get(customer.pk or 0, ()) if other.pk != new.pk]
        after = Timeline(*_terms_in_force([*others, new]), before.frozen)
        if (before.timezone, before.anchor) != (after.timezone, after.anchor):
            found[text] = list(_sentences(before, after))
    return found


def _sentences(before: Timeline, after: Timeline) -> Iterator[str]:
    """Yield sentences about the present and the next billing period after an edit of the terms `before`."""
    now = int(moments.now().timestamp()) * _SECOND
    for period in before.freeze_until(now):
        after.freeze(period)
    present = after.at(now)
    following = after.at(present.end)
    if after.is_frozen(present):
        text = gettext("The present billing period stays as it is. It ends at %(end)s %(zone)s.")
    else:
        text = gettext(
            "No billing period was used yet, so the edit applies to all of them. The present one lasts from %(start)s"
            " to %(end)s %(zone)s."
        )
    yield text % {"start": present.local_start(), "end": present.local_end(), "zone": present.timezone}
    text = gettext("The next billing period begins then, at %(start)s %(zone)s, and ends at %(end)s %(zone)s.")
    yield text % {"start": following.local_start(), "end": following.local_end(), "zone": following.timezone}
