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
from ratelimits.models.history import because, record
from ratelimits.models.versions import editing

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


def hand_over_account(using: str, text: str, former: Customer, customer: Customer, begun: int, since: int) -> None:
    """Write the former customer's plan and terms to another row, and the customer's plan and terms to the text's row.

    The text keeps its row, because rows of the project may refer to it. The former customer had the text since `begun`,
    and the customer gets it from `since` on (both in µs since 1970 UTC). Both can be in the past. So each row gets all
    that was said about its customer since then, each from its own moment on.

    Call this after `hand_over`, and outside of its edit. If neither has a row, there is nothing to do (`has_account`).
    """
    with because(MOVED):
        own = Account.objects.using(using).filter(identifier=text).first()
        if own is not None:
            # The oldest row holds for all texts of the customer.
            there = _row_of(using, text, former) or _waiting_row(using, former)
            if there is None or own.pk < there.pk:
                states = _states(using, own, max(begun, since))
                to = _other_text(using, text, former) or waiting_text(former)
                there = _write(using, there or Account(identifier=to), states)
            AlertChannel.objects.using(using).filter(account=own).update(account=there)
        waiting = _waiting_row(using, customer)
        if own is None:
            if waiting is not None:
                states = _states(using, waiting, since)
                waiting.identifier = text
                _write(using, waiting, states)
            return
        source = _row_of(using, text, customer) if waiting is None else waiting
        states = [] if source is None else _states(using, source, since)
        if not states or states[0][0] > since:  # There was no row yet.
            states.insert(0, (since, _of_customer(Account())))
        _write(using, own, states)
        if waiting is not None:
            AlertChannel.objects.using(using).filter(account=waiting).update(account=own)
            with editing(using, since=since):
                waiting.delete(using=using)


def hand_over_deleted(using: str, text: str, former: Customer, begun: int, since: int) -> None:
    """Give the former customer of a text what deleted rows of the text have said about it from `since` on.

    Otherwise this would be said about the customer who gets the text. Call this as `hand_over_account`.
    """
    history: Any = Account.history
    live = Account.objects.using(using).values("pk")
    pks = history.using(using).filter(identifier=text).exclude(id__in=live).order_by("id").values_list("id", flat=True)
    for pk in pks.distinct():
        deletion = history.using(using).filter(id=pk).order_by("-version", "-history_id").first()
        row, deleted = deletion.instance, deletion.since
        if deletion.history_type != "-" or deleted <= since:
            continue
        with because(MOVED):
            if deleted > begun and _row_of(using, text, former) is None and _waiting_row(using, former) is None:
                states = [state for state in _states(using, row, max(begun, since)) if state[0] < deleted]
                to = _other_text(using, text, former) or waiting_text(former)
                kept = _write(using, Account(identifier=to), states)
                with editing(using, since=deleted):
                    kept.delete(using=using)
            with editing(using, since=since) as edit:
                # The record is about the customer who gets the text, so it must say nothing about the former one.
                for name, value in _of_customer(Account()).items():
                    setattr(row, name, value)
                row.version, row.since = edit.version, edit.since
                record([row], "-", using)


def has_account(using: str, text: str, customer: Customer) -> bool:
    """Return whether the text or the waiting customer has a row in the table of accounts."""
    return Account.objects.using(using).filter(identifier__in=[text, waiting_text(customer)]).exists()


def _row_of(using: str, text: str, customer: Customer) -> Account | None:
    """Return the row that says the plan and the terms of a customer; the row of this text is not asked."""
    texts = customer.names.using(using).filter(until=None).exclude(identifier=text).values("identifier")
    return Account.objects.using(using).filter(identifier__in=texts).order_by("pk").first()


def _waiting_row(using: str, customer: Customer) -> Account | None:
    return Account.objects.using(using).filter(identifier=waiting_text(customer)).first()


#: What a row of an account says about its customer, from a moment on (µs since 1970 UTC).
_State = tuple[int, dict[str, Any]]


def _of_customer(row: Account) -> dict[str, Any]:
    return {name: getattr(row, name) for name in _OF_CUSTOMER}


def _states(using: str, row: Account, since: int) -> list[_State]:
    """Return what a row has said about its customer from `since` on, oldest first."""
    history: Any = Account.history
    columns = ("since", "history_type", *_OF_CUSTOMER)
    records = list(history.using(using).filter(id=row.pk).order_by("version", "history_id").values(*columns))
    states: list[_State] = []
    for moment in (since, *sorted({each["since"] for each in records if each["since"] > since})):
        found = next((each for each in reversed(records) if each["since"] <= moment), None)
        if found is None and records and records[0]["history_type"] != "+":
            found = records[0]  # the row is older than its history
        if found is not None:
            values = {name: found[name] for name in _OF_CUSTOMER}
            if not states or states[-1][1] != values:
                states.append((moment, values))
    present = _of_customer(row)
    if not states or states[-1][1] != present:  # raw SQL has written the row
        states.append((states[-1][0] if states else since, present))
    return states


def _write(using: str, row: Account, states: list[_State]) -> Account:
    """Let a row say this about its customer, and return the row. Each state is an edit of its own.

    Also save a row that says the same already: each record of its history is then about one customer.
    """
    for moment, values in states:
        for name, value in values.items():
            setattr(row, name, value)
        with editing(using, since=moment):
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
