"""What belongs to a customer when an account text goes from one customer to another: rows that name the account.

These are overrides, blocks and allows of "account:acme", and the account's row with its plan and terms. They stay with
the customer. So they get another text of the customer. If it has none, they get a text that no request has, and wait
for the customer's next text.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.db.models import Q

from ratelimits import moments
from ratelimits.models import Access, Account, Customer, KeyOverride, Name
from ratelimits.models.customers import waiting_text
from ratelimits.models.history import MOVED, because
from ratelimits.models.periods import keeping_terms

#: The models whose rows name an account by its key, each with the column of the key, and further columns: two rows with
#: the same values in these columns must not be in force at the same time.
_KEYED: tuple[tuple[Any, str, tuple[str, ...]], ...] = ((KeyOverride, "key", ("rule",)), (Access, "target", ()))


def hand_over(using: str, text: str, former: Customer, customer: Customer) -> None:
    """Take away the rows of a text's former customer, and bring those of the customer who has the text now.

    Call this in the edit that gives the text to the customer, after the names are written.
    """
    with because(MOVED):
        _take_away(using, text, former)
        _bring(using, text, customer)
        _hand_over_account(using, text, former, customer)


def _other_text(using: str, text: str, customer: Customer) -> str | None:
    """Return the newest of the other texts that name a customer now; None if there is none."""
    names = Name.objects.using(using).filter(customer=customer, until=None).exclude(identifier=text)
    newest_first = names.order_by("-since", "identifier").values_list("identifier", flat=True)
    return newest_first.first()


def _take_away(using: str, text: str, former: Customer) -> None:
    to = _other_text(using, text, former) or waiting_text(former)
    for model, column, distinct in _KEYED:
        rows = model.objects.using(using).filter(**{column: f"account:{text}"})
        there = list(model.objects.using(using).filter(**{column: f"account:{to}"}))
        # Perhaps the other text has such a row already: it was copied when the customer got this text.
        doubled = [row.pk for row in rows if any(_overlap(row, other, distinct) for other in there)]
        rows.filter(pk__in=doubled).delete()
        rows.update(**{column: f"account:{to}"})


def _bring(using: str, text: str, customer: Customer) -> None:
    waiting = waiting_text(customer)
    other = _other_text(using, text, customer)
    now = moments.now()
    for model, column, _distinct in _KEYED:
        rows = model.objects.using(using)
        if other is None:
            rows.filter(**{column: f"account:{waiting}"}).update(**{column: f"account:{text}"})
            continue
        in_force = rows.filter(Q(valid_until=None) | Q(valid_until__gt=now), **{column: f"account:{other}"})
        rows.bulk_create([_copy(row, column, f"account:{text}") for row in in_force.order_by("pk")])


def _hand_over_account(using: str, text: str, former: Customer, customer: Customer) -> None:
    """Let the account's row of each customer have another text of this customer.

    The row itself stays the same, with its plan, its terms, its alert channels, and rows of the project that refer to
    it. So nothing is said about the past here.
    """
    rows = Account.objects.using(using)
    own, waiting = (rows.filter(identifier=one).first() for one in (text, waiting_text(customer)))
    # The terms stay with their customers, so no period must be frozen.
    with keeping_terms():
        if own is not None:
            own.identifier = _other_text(using, text, former) or waiting_text(former)
            own.save(using=using)
        if waiting is not None:
            waiting.identifier = text
            waiting.save(using=using)


def _copy(row: Any, column: str, key: str) -> Any:
    left_out = {"id", "version", "since", "shard", column}
    values = {field.attname: getattr(row, field.attname) for field in row._meta.concrete_fields}
    return type(row)(**{name: value for name, value in values.items() if name not in left_out}, **{column: key})


def _overlap(row: Any, other: Any, distinct: tuple[str, ...]) -> bool:
    """Return whether two rows are about the same and are in force at the same time at some moment."""
    if any(getattr(row, name) != getattr(other, name) for name in distinct):
        return False
    return _begins_before_end(row.valid_from, other.valid_until) and _begins_before_end(
        other.valid_from, row.valid_until
    )


def _begins_before_end(begin: datetime | None, end: datetime | None) -> bool:
    return begin is None or end is None or begin < end
