"""What belongs to a customer when an account text goes from one customer to another: rows that name the account.

These are overrides, blocks and allows of "account:acme", and the account's plan and terms. They stay with the customer.
So they get another text of the customer. If it has none, they get a text that no request has, and wait for the
customer's next text.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.db.models import Q

from ratelimits import moments
from ratelimits.models import Access, Account, AlertChannel, Customer, KeyOverride, Name
from ratelimits.models.customers import waiting_text
from ratelimits.models.history import because

#: The reason with which histories record what a move changes.
MOVED = "the account text was moved to another customer"
#: The models whose rows name an account by its key, each with the column of the key, and further columns: two rows with
#: the same values in these columns must not be in force at the same time.
_KEYED: tuple[tuple[Any, str, tuple[str, ...]], ...] = ((KeyOverride, "key", ("rule",)), (Access, "target", ()))


#: What the row of an account says about its customer.
_OF_CUSTOMER = ("name", "timezone", "billing_anchor", "plan_id", "next_plan_id", "next_plan_at")


def hand_over(using: str, text: str, former: Customer, customer: Customer) -> None:
    """Take away the rows of a text's former customer, and bring those of the customer who has the text now.

    Call this in the edit that gives the text to the customer, after the names are written.
    """
    with because(MOVED):
        _take_away(using, text, former)
        _bring(using, text, customer)


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


def hand_over_account(using: str, text: str, former: Customer, customer: Customer) -> None:
    """Write the former customer's plan and terms to another row, and the customer's plan and terms to the text's row.

    The text keeps its row, because rows of the project may refer to it. Call this in an edit, after `hand_over`. If
    neither has such a row, there is nothing to do (see `has_account`).
    """
    with because(MOVED):
        own = Account.objects.using(using).filter(identifier=text).first()
        if own is not None:
            to = _other_text(using, text, former) or waiting_text(former)
            there = Account.objects.using(using).filter(identifier=to).first()
            if there is None:
                there = _write(using, Account(identifier=to), own)
            elif own.pk < there.pk:  # the older row holds for all texts of the customer
                _write(using, there, own)
            AlertChannel.objects.using(using).filter(account=own).update(account=there)
        waiting = Account.objects.using(using).filter(identifier=waiting_text(customer)).first()
        if own is None:
            if waiting is not None:
                waiting.identifier = text
                waiting.save(using=using)
            return
        source = _row_of(using, text, customer) if waiting is None else waiting
        _write(using, own, Account() if source is None else source)
        if waiting is not None:
            AlertChannel.objects.using(using).filter(account=waiting).update(account=own)
            waiting.delete(using=using)


def has_account(using: str, text: str, customer: Customer) -> bool:
    """Return whether the text or the waiting customer has a row in the table of accounts."""
    return Account.objects.using(using).filter(identifier__in=[text, waiting_text(customer)]).exists()


def _row_of(using: str, text: str, customer: Customer) -> Account | None:
    """Return the row that says the plan and the terms of a customer; the row of this text is not asked."""
    texts = customer.names.using(using).filter(until=None).exclude(identifier=text).values("identifier")
    return Account.objects.using(using).filter(identifier__in=texts).order_by("pk").first()


def _write(using: str, row: Account, source: Account) -> Account:
    """Give a row what the source says about its customer, and return the row.

    Also save a row that says the same already: each record of its history is then about one customer.
    """
    for name in _OF_CUSTOMER:
        setattr(row, name, getattr(source, name))
    row.save(using=using)
    return row


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
