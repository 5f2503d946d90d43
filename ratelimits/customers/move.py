"""Give an account text to another customer.

This one operation renames a customer (give it a new text), gives a former text to somebody else, merges two customers
(give all texts of one to the other), splits a customer (give one of its texts to a new customer), and swaps texts.

The usage of a text from a quarter of an hour on belongs to the text's new customer. Earlier usage stays with its former
customers, and no report changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from django.db import transaction
from django.utils.translation import gettext as _

from ratelimits import moments
from ratelimits.algorithms.parsing import MICROSECONDS
from ratelimits.conf import conf
from ratelimits.customers.belongings import hand_over, hand_over_account, has_account
from ratelimits.customers.counting import closed_until, count_again
from ratelimits.engine.keys import BIN_SECONDS, account_shard
from ratelimits.models import Customer, Name, PeriodUsage, ShardState
from ratelimits.models.customers import DatedName, make_missing, names_of
from ratelimits.models.keys import canonical_account
from ratelimits.models.periods import keeping_terms, lock
from ratelimits.models.versions import editing
from ratelimits.moments.databases import now_of
from ratelimits.usage import crash


class NotMovedError(ValueError):
    """Raised if a text cannot be given to a customer as requested; the message says why."""


@dataclass(frozen=True, slots=True)
class Move:
    """What a move has done.

    text           the account text
    former         the customer who had the text
    customer       the customer who has the text now
    since          the quarter of an hour (s since 1970 UTC) from which on usage of the text belongs to this customer
    counted_again  whether usage that was already in the totals went from one customer to the other
    """

    text: str
    former: Customer
    customer: Customer
    since: int
    counted_again: bool = False


def next_quarter(using: str) -> int:
    """Return the start of the next quarter of an hour (s since 1970 UTC), by the clock of the database."""
    return (int(now_of(using).timestamp()) // BIN_SECONDS + 1) * BIN_SECONDS


def move(text: str, customer: Customer | None = None, since: int | None = None) -> Move:
    """Give an account text to a customer, from a quarter of an hour on. Without a customer, make a new one.

    `since` is in s since 1970 UTC, and by default the next quarter. 0 gives all usage of the text to the customer. If
    the text has other customers after `since`, this customer replaces them. If the customer has the text already, do
    nothing. While this runs, no usage of the text is drained or tallied.

    Raise NotMovedError for anonymous usage, if `since` is no quarter or is after the next quarter, or if a report has
    usage of the text from after `since`.
    """
    using, text = conf.DATABASE, canonical_account(text)
    if not text or (customer is not None and customer.names.using(using).filter(identifier="").exists()):
        raise NotMovedError(_("Anonymous usage belongs to nobody: it cannot be given to a customer, or a text to it."))
    with transaction.atomic(using=using):
        tallied = _lock_shards(using, text)
        crash.reached("move:locked")
        # If usage of a text is not tallied yet, the text has no customer. It must not go to another one silently.
        make_missing(using, [text])
        names = names_of(using, [text])[text]
        since = _checked(using, text, since)
        former = Customer.objects.using(using).get(pk=names[-1].customer)
        customer = customer or Customer.objects.using(using).create()
        assert customer.pk is not None
        new_names = _with(names, DatedName(since, customer.pk))
        if new_names == names:
            return Move(text, former, customer, since)
        _give(using, text, new_names, since, former, customer)
        crash.reached("move:named")
        counted_again = count_again(using, text, since, tallied)
        crash.reached("move:counted")
    crash.reached("move:committed")
    return Move(text, former, customer, since, counted_again)


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


def _checked(using: str, text: str, since: int | None) -> int:
    """Return the quarter from which on a text can be given to a customer. Raise NotMovedError if there is none."""
    following = next_quarter(using)
    since = following if since is None else since
    if since < 0 or since % BIN_SECONDS:
        raise NotMovedError(_("Usage is counted by quarters of an hour: choose a full quarter, such as 10:15."))
    if since > following:
        raise NotMovedError(
            _(
                "A text can be given to a customer from the next quarter of an hour on (%(next)s), or from an earlier"
                " one."
            )
            % {"next": _shown(following)}
        )
    closed = closed_until(using, text)
    if since < closed:
        raise NotMovedError(
            _("A report has usage of %(text)s up to %(closed)s: choose this moment or a later one.")
            % {"text": text, "closed": _shown(closed)}
        )
    return since


def _shown(seconds: int) -> str:
    return moments.local_text(datetime.fromtimestamp(seconds, UTC))


def _with(names: list[DatedName], new: DatedName) -> list[DatedName]:
    """Return the names of a text, oldest first, with a new name that replaces all later ones."""
    earlier = [name for name in names if name.since < new.since]
    return earlier if earlier and earlier[-1].customer == new.customer else [*earlier, new]


def _give(using: str, text: str, names: list[DatedName], since: int, former: Customer, customer: Customer) -> None:
    """Write the names of a text from `since` on, in an edit: limits, overrides and blocks change with it."""
    with editing(using) as edit:
        rows = Name.objects.using(using).filter(identifier=text)
        # Whoever tallies other usage of these customers reads their terms before this move, or after it.
        lock(using, {*rows.values_list("customer", flat=True), former.pk, customer.pk})
        first = rows.get(since=0)
        rows.filter(since__gte=since).delete()
        new = names[-1]
        if new.since < since:  # The customer gets a text back that it had before: its last name lasts.
            rows.filter(since=new.since).update(until=None, version=edit.version)
        else:
            if len(names) > 1:
                rows.filter(since=names[-2].since).update(until=since)
            rows.create(
                identifier=text,
                customer_id=new.customer,
                since=since,
                shard=first.shard,
                version=edit.version,
                counter=first.counter if first.customer_id == new.customer else new.customer,
            )
        # Each process then reads the rows about the keys of the text's shard again.
        first.tombstone(edit).save(using=using)
        if former != customer:
            hand_over(using, text, former, customer)
    if former != customer and has_account(using, text, customer):
        # Bills have the new plan and the new terms of the text from the quarter on, and not from the edit on.
        with editing(using, since=since * MICROSECONDS), keeping_terms():
            hand_over_account(using, text, former, customer)
