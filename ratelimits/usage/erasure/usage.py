"""Replacing a customer's names in the tables of usage: totals, gaps, quarantined batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote

from django.db.models import Model, QuerySet

from ratelimits.salts import new_salt
from ratelimits.usage.erasure.about import SECOND, About
from ratelimits.usage.ledger import span_totals
from ratelimits.usage.ledger.packet import canonical, values
from ratelimits.usage.ledger.retention.erase import write_names
from ratelimits.usage.ledger.verify.row_digests import (
    digests_of_totals,
    names_of_processes,
    row_columns,
    rows_of,
    sums_of_totals,
)
from ratelimits.usage.models import DurabilityGap, KeyTotal, PeriodUsage, ProcessTotal, QuarantinedBatch, erased
from ratelimits.usage.models.ledger import SUBJECT

_CHUNK = 2000
_KEY, _BIN = SUBJECT.index("key"), SUBJECT.index("bin")
#: The indexes of the bin, the account and the key in the name of a counter in Redis, and how many parts it has.
_FIELD_BIN, _FIELD_ACCOUNT, _FIELD_KEY, _FIELD_PARTS = 1, 5, 6, 8


def erase_totals(about: About) -> int:
    """Replace the names in totals of billing periods and of spans of time. Return how many rows have changed.

    The names of the customer must be replaced already.
    """
    rows = PeriodUsage.objects.using(about.using).filter(customer=about.customer)
    count = sum(rows.filter(account=text).update(account=about.pseudonyms.account(text)) for text in about.texts)
    return count + span_totals.count_again(about.using, [*about.texts, *map(about.pseudonyms.account, about.texts)])


class ProcessTotals:
    """The process totals of a customer's texts. Make this before the names are replaced, and call `erase` after it.

    A text that another customer has too gets another salt. So the digests of the other customer's totals change too.
    """

    def __init__(self, about: About) -> None:
        self._about = about
        self._rows = ProcessTotal.objects.using(about.using).filter(account__in=about.texts)
        self._parts = [list(sums_of_totals(self._rows)), list(names_of_processes(self._rows))]
        self._before = [digests_of_totals(about.using, rows) for rows in self._parts]

    def erase(self) -> int:
        """Replace the names, and note the digests. Return how many rows have changed."""
        about = self._about
        for rows, before in zip(self._parts, self._before, strict=True):
            after = digests_of_totals(about.using, [self._replaced(row) for row in rows])
            erased.note(about.using, zip(before, after, strict=True))
        changed = [
            (*about.names.replaced(account, key), pk)
            for pk, account, key, bin_ in self._rows.values_list("pk", "account", "key", "bin")
            if about.names.has(account, bin_)
        ]
        write_names(about.using, ProcessTotal, ("account", "key"), changed)
        return len(changed)

    def _replaced(self, row: Any) -> Any:
        kind, bin_, account, key, *others = row
        names = self._about.names
        return (kind, bin_, *names.replaced(account, key), *others) if names.has(account, bin_) else row


def totals_of(about: About) -> int:
    """Return how many totals of billing periods and of spans of time name the customer."""
    rows = PeriodUsage.objects.using(about.using).filter(customer=about.customer, account__in=about.texts)
    return rows.count() + KeyTotal.objects.using(about.using).filter(account__in=about.texts).count()


def gaps_of(about: About) -> QuerySet[DurabilityGap]:
    """Return the declared gaps that name the customer."""
    return DurabilityGap.objects.using(about.using).filter(about.names.within("since", unit=SECOND))


def erase_gaps(about: About) -> list[int]:
    """Replace the names in declared gaps. Return the primary keys of the changed rows."""
    changed = list(gaps_of(about))
    before = _digests(DurabilityGap, about.using, changed)
    for gap in changed:
        # The text of the event has the account, and says which event declared the gap.
        gap.account, gap.event = about.pseudonyms.account(gap.account), f"{gap.kind}:erased:{gap.pk}"
        gap.detail, gap.reason = about.scrub(gap.detail), about.scrub.cut(gap.reason, 200)
        gap.salt = new_salt()
        gap.save(using=about.using)
    erased.note(about.using, zip(before, _digests(DurabilityGap, about.using, changed), strict=True))
    return [gap.pk for gap in changed]


def quarantined_of(about: About) -> Iterator[tuple[QuarantinedBatch, Any, str]]:
    """Yield the quarantined batches that name the customer, each with its fields and its reason with pseudonyms."""
    for row in QuarantinedBatch.objects.using(about.using).order_by("pk").iterator(_CHUNK):
        fields, reason = _fields(about, row.fields), about.scrub.cut(row.reason, 300)
        if (fields, reason) != (row.fields, row.reason):
            yield row, fields, reason


def erase_quarantined(about: About) -> list[int]:
    """Replace the names in quarantined batches. Return the primary keys of the changed rows."""
    changed, before = [], []
    for row, fields, reason in quarantined_of(about):
        before += _digests(QuarantinedBatch, about.using, [row])
        if not isinstance(row.fields, list):
            row.content = new_salt()  # it was a checksum of the fields
        row.fields, row.reason, row.salt = fields, reason, new_salt()
        row.save(using=about.using)
        changed.append(row)
    erased.note(about.using, zip(before, _digests(QuarantinedBatch, about.using, changed), strict=True))
    return [row.pk for row in changed]


def _digests(model: type[Model], using: str, rows: list[Any]) -> list[str]:
    """Return the digests that a manifest has of these rows."""
    stored = model._default_manager.using(using).filter(pk__in=[row.pk for row in rows])
    found = rows_of(stored, "pk", row_columns(model))
    return [found[str(row.pk)] for row in rows]


def _fields(about: About, fields: Any) -> Any:
    """Return the fields of a quarantined batch with pseudonyms: canonical lines, or counters as they were in Redis."""
    if isinstance(fields, list):
        return [_line(about, line) if isinstance(line, str) else about.scrub(line) for line in fields]
    if isinstance(fields, dict):
        return {_counter(about, name): about.scrub(value) for name, value in fields.items()}
    return about.scrub(fields)


def _line(about: About, line: str) -> str:
    row: list[Any] = values(line.encode())
    if len(row) <= _BIN or not row[_BIN].isdecimal():
        return str(about.scrub(line))
    new = about.names.replace_line(row)
    return line if new is None else canonical(new).decode()


def _counter(about: About, name: str) -> str:
    parts = name.split("|")
    if len(parts) != _FIELD_PARTS or not parts[_FIELD_BIN].isdecimal():
        return str(about.scrub(name))
    account, key = unquote(parts[_FIELD_ACCOUNT]), unquote(parts[_FIELD_KEY])
    if not about.names.has(account, int(parts[_FIELD_BIN])):
        return name
    new_account, new_key = about.names.replaced(account, key)
    parts[_FIELD_ACCOUNT], parts[_FIELD_KEY] = (quote(text, safe=":@.-_~") for text in (new_account, new_key))
    return "|".join(parts)
