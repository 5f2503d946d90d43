"""Find what a move would do, before it is made. Nothing is written here."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import NamedTuple

from django.db.models import Q
from django.utils.translation import gettext as _

from ratelimits import moments
from ratelimits.algorithms.billing_periods import Period, Timeline
from ratelimits.engine.keys import BIN_SECONDS
from ratelimits.models import Account, Customer, Move, Name
from ratelimits.models.accounts import ReferredError, refuse_references
from ratelimits.models.customers import (
    DatedName,
    customer_at,
    customers_now,
    is_waiting,
    names_of,
    waiting_text,
    waiting_token,
)
from ratelimits.models.keys import canonical_account
from ratelimits.models.periods import customer_timelines
from ratelimits.moments import now_of
from ratelimits.usage.customers.counting import closed_until
from ratelimits.usage.ledger.bills import bills
from ratelimits.usage.models import Line, PeriodUsage
from ratelimits.usage.models.sums import ExactSum

_SECOND = 1_000_000
#: Two numbers that stand for primary keys of customers: of one who does not exist yet, and of nobody, who has the usage
#: of a text that is not tallied yet.
_NEW, NOBODY = 0, -1


class NotMovedError(ValueError):
    """Raised if a text cannot be given to a customer as requested; the message says why."""


class MovedUsage(NamedTuple):
    """Net usage of one meter that goes from a billing period of one customer to a billing period of another.

    `former` and `period` are the primary key of the customer who has it now (or NOBODY), and the customer's period.
    `to_period` is the period in which it will be.
    """

    meter: str
    units: int
    former: int
    period: Period
    to_period: Period


class StayingUsage(NamedTuple):
    """Net usage of one meter of before a move that stays with a customer, in periods without a final report.

    `former` is the primary key of the customer (or NOBODY), and `first` the quarter of the oldest such usage.
    """

    former: int
    meter: str
    units: int
    first: int


@dataclass(frozen=True)
class Planned:
    """What a move would do.

    text            the account text
    names           the customers whom the text names now, oldest first; empty if it never was a name
    former          the customer who loses the text; None if it never was a name
    customer        the customer who gets the text; None for a new one
    asked           the quarter (s since 1970 UTC) from which on the usage is to be the customer's
    since           the quarter from which on the text will name the customer. It is later than `asked` if reports have
                    usage of the text, or of the customer: such usage can only be moved by adjustments
    former_texts    the other texts of the former customer
    customer_texts  the other texts of the customer
    """

    using: str
    text: str
    names: Sequence[DatedName]
    former: Customer | None
    customer: Customer | None
    asked: int
    since: int
    former_texts: Sequence[str] = ()
    customer_texts: Sequence[str] = ()

    @property
    def new_names(self) -> list[DatedName]:
        """Return the names of the text after the move, oldest first. A new customer has the primary key 0."""
        earlier = [name for name in self.names if name.since < self.since]
        return earlier if earlier and earlier[-1].customer == self._pk else [*earlier, DatedName(self.since, self._pk)]

    @property
    def _pk(self) -> int:
        return _NEW if self.customer is None or self.customer.pk is None else self.customer.pk

    @property
    def has_text(self) -> bool:
        """Return whether the text names the customer now: then the move only gives it usage of before."""
        return bool(self.names) and self.names[-1].customer == self._pk

    @property
    def changes_names(self) -> bool:
        """Return whether the text will name other customers than now."""
        return self.new_names != list(self.names)

    @property
    def changes_nothing(self) -> bool:
        """Return whether the customer has the text already, and all of its usage from this moment on."""
        return not self.changes_names and not self.adjusted

    @cached_property
    def kind(self) -> Move.Kind:
        """Return what the move is for people."""
        if self.customer is None:
            return Move.Kind.REUSE if not self.former_texts or self._is_former_name() else Move.Kind.SPLIT
        if not self.customer_texts and self._takes_back():
            return Move.Kind.SWAP
        if not self.customer_texts or self.is_unused or self._is_new_name():
            return Move.Kind.RENAME
        return Move.Kind.GIVE if self.former_texts else Move.Kind.MERGE

    def _is_former_name(self) -> bool:
        """Return whether the customer who loses the text was given another name later, which it keeps."""
        moves = Move.objects.using(self.using).filter(customer=self.former)
        got = moves.filter(text=self.text).values_list("pk", flat=True).first() or 0
        return moves.filter(kind=Move.Kind.RENAME, text__in=self.former_texts, pk__gt=got).exists()

    def _is_new_name(self) -> bool:
        """Return whether all that is known of the text is usage: its customer has no account, report or other text."""
        texts = [self.text]
        if self.former is not None:
            names = Name.objects.using(self.using).filter(customer=self.former)
            has_report = bills.reported_until(self.using, self.former) is not None
            if has_report or names.exclude(identifier=self.text).exists():
                return False
            texts.append(waiting_text(self.former))
        return not Account.objects.using(self.using).filter(identifier__in=texts).exists()

    def _takes_back(self) -> bool:
        """Return whether the customer lost a text to the former customer before: then this move completes a swap."""
        moves = Move.objects.using(self.using).filter(former=self.customer, customer=self.former)
        return moves.exclude(text=self.text).exists()

    @cached_property
    def is_unused(self) -> bool:
        """Return whether nobody has used the text yet, and there is no row for it in the table of accounts."""
        used = PeriodUsage.objects.using(self.using).filter(account=self.text).exists()
        used = used or Line.objects.using(self.using).filter(account=self.text).exists()
        return not used and not Account.objects.using(self.using).filter(identifier=self.text).exists()

    @cached_property
    def counted_again(self) -> list[MovedUsage]:
        """Return the usage that the move counts again."""
        return self._moved(self.since, None)

    @cached_property
    def adjusted(self) -> list[MovedUsage]:
        """Return the usage that only adjustments can move, because of reports of the text or of the customer.

        Raise NotMovedError if adjustments have moved such usage already, or if its ledger lines are archived.
        """
        if self.asked >= self.since:
            return []
        self._refuse_second_adjustment()
        self._refuse_archived()
        return [usage for usage in self._moved(self.asked, self.since) if usage.units]

    @cached_property
    def staying(self) -> list[StayingUsage]:
        """Return the usage of the text of before the move that stays with others, in periods that no report has."""
        units: Counter[tuple[int, str]] = Counter()
        oldest: dict[tuple[int, str], int] = {}
        for bin_, meter, used in self._usage(closed_until(self.using, self.text), self.asked):
            former = self._former_at(bin_)
            if former != self._pk:
                units[former, meter] += used
                oldest[former, meter] = min(bin_, oldest.get((former, meter), bin_))
        return [StayingUsage(*key, used, oldest[key]) for key, used in sorted(units.items()) if used]

    def _moved(self, first: int, end: int | None) -> list[MovedUsage]:
        """Return the usage of others from `first` on and before `end`, oldest first."""
        sums: Counter[tuple[Period, int, Period, str]] = Counter()
        for bin_, meter, units in self._usage(first, end):
            former, at = self._former_at(bin_), bin_ * _SECOND
            if former != self._pk:
                sums[self._timeline(former).at(at), former, self._timeline(self._pk).at(at), meter] += units
        return [
            MovedUsage(meter, units, former, period, to_period)
            for (period, former, to_period, meter), units in sorted(sums.items())
        ]

    def _former_at(self, bin_: int) -> int:
        return customer_at(self.names, bin_) or NOBODY

    def _usage(self, first: int, end: int | None) -> Iterator[tuple[int, str, int]]:
        """Yield the net units of the text by bin and meter, from `first` on and before `end`."""
        lines = Line.objects.using(self.using).filter(account=self.text, bin__gte=first)
        lines = lines if end is None else lines.filter(bin__lt=end)
        sums = lines.order_by().values_list("bin", "meter").annotate(*map(ExactSum, _NET))
        for bin_, meter, admitted, refunded in sums:
            yield bin_, meter, admitted - refunded

    @cached_property
    def _timelines(self) -> dict[int, Timeline]:
        pks = {name.customer for name in self.names} | {self._pk} - {_NEW}
        return customer_timelines(self.using, pks)

    def _timeline(self, customer: int) -> Timeline:
        # A new customer has calendar months in UTC.
        return self._timelines.get(customer) or Timeline()

    def _refuse_second_adjustment(self) -> None:
        earlier = Move.objects.using(self.using).filter(text=self.text, since__gt=self.asked)
        newest = earlier.exclude(adjusted_since=None).order_by("-since").first()
        if newest is not None:
            raise NotMovedError(
                _(
                    "Adjustments have given usage of %(text)s of before %(since)s to customer %(customer)s already:"
                    " choose this moment or a later one."
                )
                % {"text": self.text, "since": shown(newest.since), "customer": newest.customer}
            )

    def _refuse_archived(self) -> None:
        """Raise NotMovedError if the ledger no longer has all lines of the reported periods."""
        totals = PeriodUsage.objects.using(self.using).filter(account=self.text)
        totals = totals.filter(period_end__gt=self.asked, period_end__lte=self.since).order_by()
        stored: Counter[tuple[int, int, str]] = Counter()
        for customer, start, meter, admitted, refunded in totals.values_list("customer", "period", "meter", *_NET):
            stored[customer, start, meter] += admitted - refunded
        if not stored:
            return
        for bin_, meter, units in self._usage(min(start for _customer, start, _meter in stored), self.since):
            former = self._former_at(bin_)
            stored[former, self._timeline(former).at(bin_ * _SECOND).start // _SECOND, meter] -= units
        if any(units > 0 for units in stored.values()):
            raise NotMovedError(
                _(
                    "Ledger lines of %(text)s of before %(since)s are archived, so nobody knows which usage an"
                    " adjustment must move: restore them first, or choose this moment or a later one."
                )
                % {"text": self.text, "since": shown(self.since)}
            )

    @property
    def digest(self) -> str:
        """Return a digest of what a person decides. Usage that is counted meanwhile does not change it."""
        newest = Move.objects.using(self.using).filter(text=self.text).values_list("pk", flat=True).first()
        decided = (self.text, newest, self._pk, self.asked, self.since, self.adjusted)
        return hashlib.sha256(repr(decided).encode()).hexdigest()


#: The counters whose difference is the net usage.
_NET = ("admitted_units", "refunded_units")


def next_quarter(using: str) -> int:
    """Return the start of the next quarter of an hour (s since 1970 UTC), by the clock of the database."""
    return (int(now_of(using).timestamp()) // BIN_SECONDS + 1) * BIN_SECONDS


def plan(using: str, text: str, customer: Customer | None = None, since: int | None = None) -> Planned:
    """Return what a move would do. `text`, `customer` and `since` are those of `move`.

    Raise NotMovedError for anonymous usage, if the text is that of a waiting customer, if `since` is no quarter or is
    after the next quarter, or if a row of the project refers to the account by its identifier.
    """
    text = canonical_account(text)
    if not text or (customer is not None and customer.names.using(using).filter(identifier="").exists()):
        raise NotMovedError(_("Anonymous usage belongs to nobody: it cannot be given to a customer, or a text to it."))
    if is_waiting(text):
        raise NotMovedError(
            _("%(text)s stands for a customer without a text, and is no text itself: choose this customer.")
            % {"text": text}
        )
    asked = _checked_moment(using, since)
    names = names_of(using, [text]).get(text, [])
    # Whoever has the text at this moment or later loses it. The newest of them is the former customer.
    losing = [name.customer for name in names if customer is None or name.customer != customer.pk]
    pk = losing[-1] if losing else names[-1].customer if names else None
    former = None if pk is None else Customer.objects.using(using).get(pk=pk)
    customers = [one for one in (former, customer) if one is not None]
    texts: dict[int, list[str]] = {}
    others = Name.objects.using(using).filter(customer__in=customers, until=None).exclude(identifier=text)
    for owner, other in others.order_by("identifier").values_list("customer", "identifier"):
        texts.setdefault(owner, []).append(other)
    if pk is not None and names[-1].customer == pk:
        _refuse_two_accounts(using, text, texts.get(pk, ()))
    if names and (customer is None or names[-1].customer != customer.pk):
        try:
            # The account of the former customer gets another identifier, and so does the one that waits for a text.
            refuse_references(using, [text] if customer is None else [text, waiting_text(customer)])
        except ReferredError as error:
            raise NotMovedError(str(error)) from error
    closed = closed_until(using, text, customer)
    if closed > next_quarter(using):  # a running period was closed by force
        raise NotMovedError(
            _("A report has usage of %(text)s or of the customer up to %(closed)s: it cannot be moved before.")
            % {"text": text, "closed": shown(closed)}
        )
    of_customer = texts.get(customer.pk or _NEW, ()) if customer is not None else ()
    return Planned(
        using, text, names, former, customer, asked, max(asked, closed), texts.get(pk or _NEW, ()), of_customer
    )


def _refuse_two_accounts(using: str, text: str, others: Sequence[str]) -> None:
    """Raise NotMovedError if raw SQL has given a second account to the customer who loses the text with an account."""
    rows = Account.objects.using(using).filter(identifier__in=[text, *others]).order_by("pk")
    accounts = list(rows.values_list("identifier", flat=True))
    if len(accounts) > 1 and text in accounts:
        raise NotMovedError(
            _("A customer has one account, but this one has several, and the oldest holds: delete all but one of %s.")
            % ", ".join(accounts)
        )


def _checked_moment(using: str, since: int | None) -> int:
    """Return the quarter from which on a text is to be given to a customer. Raise NotMovedError if it cannot be."""
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
            % {"next": shown(following)}
        )
    return since


def find_customer(using: str, typed: str) -> Customer:
    """Return the customer whom a typed text means: one of its account texts, or its token.

    Raise NotMovedError if there is none, or if the text means two customers.
    """
    text = canonical_account(typed)
    token = waiting_token(text) if is_waiting(text) else text
    found = Customer.objects.using(using).filter(Q(token=token) | Q(pk__in=customers_now(using, [text])))
    customers = list(found[:2])
    if len(customers) == 1 and text:
        return customers[0]
    if customers and text:
        raise NotMovedError(_("%(text)s is the token of one customer and the text of another.") % {"text": typed})
    raise NotMovedError(
        _("No customer has the account text or the token %(text)s: check the spelling, or choose a new customer.")
        % {"text": typed}
    )


def shown(seconds: int) -> str:
    """Return a moment (s since 1970 UTC) as text, in the time zone in which people type moments."""
    return moments.local_text(datetime.fromtimestamp(seconds, UTC)) if seconds else _("the beginning")
