"""Give an account text to another customer.

This one operation renames a customer (give it a new text), gives a former text to somebody else, merges two customers
(give all texts of one to the other), splits a customer (give one of its texts to a new customer), and swaps texts.

The usage of a text from a quarter of an hour on belongs to the text's new customer. Earlier usage stays with its former
customers, and no report changes: usage that is on reports is moved by adjustments.
"""

from __future__ import annotations

from typing import Any

from django.db import transaction
from django.utils.translation import gettext as _

from ratelimits.conf import conf
from ratelimits.engine.keys import account_shard
from ratelimits.models import Customer, Move, Name
from ratelimits.models.customers import make_missing
from ratelimits.models.keys import canonical_account
from ratelimits.models.periods import lock
from ratelimits.models.versions import editing
from ratelimits.usage.customers.belongings import hand_over
from ratelimits.usage.customers.counting import count_again
from ratelimits.usage.customers.planning import NotMovedError, Planned, next_quarter, plan, shown
from ratelimits.usage.ledger import crash
from ratelimits.usage.ledger.bills import bills
from ratelimits.usage.models import PeriodUsage, ShardState

__all__ = ["ChangedMeanwhileError", "NotMovedError", "move", "next_quarter"]

#: Maximum number of characters of a move's reason.
MAX_REASON = 200


class ChangedMeanwhileError(Exception):
    """Raised if nothing was moved, because the move would now do something else than the person has seen."""


def move(
    text: str,
    customer: Customer | None = None,
    since: int | None = None,
    *,
    by: Any = None,
    reason: str = "",
    seen: str = "",
) -> Move:
    """Give an account text to a customer, from a quarter of an hour on. Without a customer, make a new one.

    `since` is in s since 1970 UTC, and by default the next quarter. 0 gives all usage of the text to the customer. If
    the text has other customers after `since`, this customer replaces them. If the customer has the text already, do
    nothing, and return an unsaved row. While this runs, no usage of the text is drained or tallied.

    Reports never change. So if a report has usage of the text or of the customer from after `since`, the text names the
    customer from the end of the newest such report on, and adjustments move the usage of before. Their author is the
    user `by`.

    `seen` is the digest of the `Planned` that a person has confirmed; "" if nobody was asked.

    Raise NotMovedError for anonymous usage, if `since` is no quarter or is after the next quarter, if a row of the
    project refers to the account by its identifier, or if adjustments are needed and have no author or cannot be made.
    Raise ChangedMeanwhileError if the move differs from `seen`.
    """
    using, text = conf.DATABASE, canonical_account(text)
    with transaction.atomic(using=using):
        tallied = _lock_shards(using, text)
        crash.reached("move:locked")
        # If usage of a text is not tallied yet, the text has no customer. It must not go to another one silently.
        make_missing(using, [text])
        planned = plan(using, text, customer, since)
        assert planned.former is not None
        if seen and planned.digest != seen:
            raise ChangedMeanwhileError
        if planned.since > planned.asked and by is None:
            raise NotMovedError(
                _(
                    "A report has usage of %(text)s or of the customer up to %(closed)s: choose this moment or a later"
                    " one. Or say which user moves it: adjustments of this user then move the usage of before."
                )
                % {"text": text, "closed": shown(planned.since)}
            )
        if customer is not None and planned.changes_nothing:
            return Move(text=text, former=planned.former, customer=customer, since=planned.since)
        made = Move(text=text, kind=planned.kind, former=planned.former, since=planned.since, by=by)
        made.customer = customer or Customer.objects.using(using).create()
        made.reason = reason[:MAX_REASON]
        made.adjusted_since = planned.asked if planned.adjusted else None
        if planned.changes_names:
            made.version = _give(planned, made.customer)
            crash.reached("move:named")
            made.counted_again = count_again(using, text, planned.since, tallied)
            crash.reached("move:counted")
        made.save(using=using)
        _adjust(planned, made)
        crash.reached("move:adjusted")
    crash.reached("move:committed")
    return made


def _lock_shards(using: str, text: str) -> dict[int, int]:
    """Lock the shards with usage of a text until the transaction ends. Return up to which position each is tallied.

    This is one shard, or several if the setting SHARDS was changed. (Who locks many shards can deadlock with a drain,
    which writes the watermarks of many shards in one statement.)
    """
    shard = account_shard(text, conf.SHARDS)
    # The first drain of the shard adds its row. Without a row, this drain would not wait.
    ShardState.objects.using(using).bulk_create([ShardState(shard=shard)], ignore_conflicts=True)
    tallied: dict[int, int] = {}
    shards = {shard}
    while shards:
        tallied |= {number: state.tallied for number, state in ShardState.lock_all(using, shards).items()}
        totals = PeriodUsage.objects.using(using).filter(account=text).order_by()
        shards = set(totals.values_list("shard", flat=True).distinct()) - tallied.keys()
    return tallied


def _give(planned: Planned, customer: Customer) -> int:
    """Write the names of a text from `since` on, in an edit: limits, overrides, blocks and accounts change with it.

    Return the configuration's version from which on rows about the text are about the customer.
    """
    using, text, since = planned.using, planned.text, planned.since
    earlier = [name for name in planned.names if name.since < since]
    owner = Customer.objects.using(using).get(pk=planned.names[-1].customer)
    assert customer.pk is not None
    with editing(using) as edit:
        rows = Name.objects.using(using).filter(identifier=text)
        # Whoever tallies other usage of these customers reads their terms before this move, or after it.
        lock(using, {*rows.values_list("customer", flat=True), customer.pk})
        first = rows.get(since=0)
        rows.filter(since__gte=since).delete()
        if earlier and earlier[-1].customer == customer.pk:
            # The customer gets a text back that it had before: its last name lasts.
            rows.filter(since=earlier[-1].since).update(until=None, version=edit.version)
        else:
            if earlier:
                rows.filter(since=earlier[-1].since).update(until=since)
            rows.create(
                identifier=text,
                customer=customer,
                since=since,
                shard=first.shard,
                version=edit.version,
                counter=first.counter if first.customer_id == customer.pk else customer.pk,
                salt=first.salt,
            )
        # Each process then reads the rows about the keys of the text's shard again.
        first.tombstone(edit).save(using=using)
        if owner != customer:
            hand_over(using, text, owner, customer)
    return edit.version


def _adjust(planned: Planned, made: Move) -> None:
    """Take the usage that is on reports off its former customers, and give it to the customer, by adjustments."""
    if not planned.adjusted:
        return
    if bills.adjust is None:
        raise NotMovedError(
            _("Reports have this usage, and only adjustments can move it: add 'ratelimits.billing' to INSTALLED_APPS.")
        )
    # Whoever freezes periods of several customers locks them in one order.
    lock(planned.using, {made.customer_id, *(usage.former for usage in planned.adjusted)})
    for usage in planned.adjusted:
        reason = f"usage of {usage.period.name} goes with its account text: {made.reason or made.kind}"
        taken, given = (usage.former, usage.period, -usage.units), (made.customer_id, usage.to_period, usage.units)
        for customer, period, units in (taken, given):
            bills.adjust(
                planned.using,
                customer=customer,
                account=made.text,
                start=period.start,
                meter=usage.meter,
                units=units,
                reason=reason,
                author=made.by,
            )
