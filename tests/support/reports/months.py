"""Let some customers live for some months: use, adjust, edit, move and close at random, for real and in the model.

The customers share a database and its months. They live in groups of a few, which give account texts to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from random import Random
from typing import Any

from django.contrib.auth import get_user_model
from django.db.models import QuerySet

from ratelimits import engine
from ratelimits.billing.models import Adjustment
from ratelimits.billing.reports.closing.close import finalise
from ratelimits.conf import conf
from ratelimits.engine.keys import account_shard
from ratelimits.engine.server import current_server
from ratelimits.models import Account, ConfigVersion, Customer, Name, Plan
from ratelimits.models.accounts import SecondAccountError
from ratelimits.models.accounts.named import named_now
from ratelimits.models.customers import waiting_text
from ratelimits.models.periods import timelines_of
from ratelimits.moments import moment
from ratelimits.usage.customers.move import NotMovedError, move
from ratelimits.usage.ledger.drain import drain
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.ledger.tally import tally
from ratelimits.usage.models import ShardState
from tests.reference.amounts import SECOND
from tests.reference.customers import Books, Use
from tests.reference.periods import DAY
from tests.support.reports.edits import edit_at
from tests.support.reports.files import MonthlyFiles
from tests.support.reports.offers import PLANS, Offers
from tests.support.reports.zones import NewZones
from tests.support.usage.traffic import opened_late, use

FIRST, END_OF_CLOCKS = (datetime(year, 1, 1, tzinfo=UTC) for year in (2024, 2100))
HOUR, QUARTER = DAY // 24, 900 * SECOND
GRACE = 3600
ZONES = (
    *("UTC", "Europe/Berlin", "America/New_York", "America/Santiago", "Pacific/Kiritimati", "Pacific/Pago_Pago"),
    *("Asia/Kolkata", "Asia/Kathmandu", "Australia/Lord_Howe", "Africa/Cairo"),
)
#: Among them days that many months do not have, and local times that the clocks skip or have twice.
ANCHORS = (
    *("", "", "", "2024-01-31T06:00", "2024-01-02T00:00", "2024-01-15T12:30", "2024-02-29T23:45", "2024-03-31T02:30"),
    "2024-10-27T02:30",
)
#: What new time zone data say of some zones: what the data of today say of others.
CHANGED_ZONES = {"Europe/Berlin": "Africa/Lagos", "America/New_York": "America/Chicago", "Asia/Kolkata": "Asia/Tokyo"}
METERS = ("requests", "requests", "requests", "tokens")
#: Two requests of so many units are too many for the total of a period.
LARGE = 3 * 2**61
#: The settings of the histories, beside LATE_USAGE.
SETTINGS: dict[str, Any] = {
    "SHARDS": 4,
    "GRACE_SECONDS": GRACE,
    "RELOAD_INTERVAL": 300_000_000,
    # Usage is given back by the server's clock.
    "RECEIPT_TTL": 10 * 365 * 86_400,
    "PUSH": {"stripe": {"KEY": "sk_test", "SINCE": "2024-03"}},
}


@dataclass
class Group:
    """The account texts of some customers, and the numbers of these customers."""

    number: int
    texts: list[str]
    customers: list[int]


class History:
    """Draw what happens, do it for real, and tell the model. `found` is what differs at once."""

    def __init__(
        self,
        seed: str,
        customers: int,
        months: int,
        late_usage: str,
        always_fsync: Callable[[bool], object],
        *,
        disturbed: bool,
    ) -> None:
        self.draw, self.months, self._always_fsync = Random(seed), months, always_fsync
        self.books = Books(late_usage)
        self.now = self.last_closing = self.last_edit = int(FIRST.timestamp()) * SECOND
        self.author, _created = get_user_model().objects.get_or_create(username="finance")
        self.groups = [
            Group(number, [f"{number}.{each}" for each in range(min(4, customers - 4 * number))], [])
            for number in range((customers + 3) // 4)
        ]
        self.pks: dict[int, int] = {}
        self.late: list[tuple[int, dict[str, Any]]] = []
        self.files, self.taken_at = MonthlyFiles("2023-10", push="stripe"), dict[str, int]()
        #: Whether raw SQL and other time zone data come in between. Then the history of the edits and the data of
        #: today do not say what was frozen.
        self.disturbed = disturbed
        self.zones = NewZones(ZONES, CHANGED_ZONES)
        self.counts = {"uses": 0, "edits": 0, "moves": 0, "refused moves": 0, "adjustments": 0}
        self.found: list[str] = []
        self.offers = Offers(self.draw, self.books)

    # What happens, and when

    def run(self) -> None:
        try:
            for at, act, group in sorted(self._planned(), key=lambda each: each[0]):
                self.now = at
                act() if group is None else act(group)
            for _step in range(4):
                self.now += 35 * DAY
                self.close(everything=True)
            self.now += 80 * DAY
            self._take()
        finally:
            self.zones.restore()
            self.books.zones.clear()

    def _planned(self) -> Iterator[tuple[int, Any, Group | None]]:
        draw = self.draw
        for group in self.groups:
            yield from ((self.now + draw.randrange(DAY), self.edit_plan, group) for _text in group.texts)
        for month in range(self.months):
            start = self.now + int(30.44 * month * 86_400) * SECOND

            def at(start: int = start) -> int:
                return start + draw.randrange(30 * 86_400) * SECOND

            for group in self.groups:
                for act, times in self._acts(group):
                    for _time in range(int(times + draw.random())):
                        yield at(), act, group
            for _edit in range(2):
                yield at(), self.edit_offer, None
            if self.disturbed and draw.random() < 0.2:
                yield at(), self.change_zones, None
            for day in range(2, 30, 7):
                yield start + day * DAY, draw.choice((self.flow, self.flow, self.drain)), None
            yield from ((start + day * DAY + SECOND, self.close, None) for day in (3, 17))

    def _acts(self, group: Group) -> Iterator[tuple[Any, float]]:
        """Yield what a group does, and how often in a month."""
        yield from ((self.use, 7), (self.edit_terms, 0.8), (self.edit_plan, 0.6))
        yield self.disturb, 0.3 * self.disturbed
        yield from ((self.move, 0.5), (self.swap, 0.08), (self.adjust, 0.4))
        yield self.overflow, 0.5 * (group.number == 0)

    def use(self, group: Group) -> None:
        draw, text = self.draw, self.draw.choice(group.texts)
        what, at = draw.random(), self.now
        if what < 0.02:  # a clock is ahead
            at += draw.randrange(40 * 86_400) * SECOND
        elif what < 0.2:  # at the edge of a period
            start, end = self.books.customers[self.books.customer(text, at)].periods.period(at)
            at = draw.choice((start - SECOND, start, end - SECOND, end))
        units = draw.randrange(1, 60)
        key, meter, refunded = f"api_key:{draw.randrange(2)}", draw.choice(METERS), draw.random() < 0.05
        about: dict[str, Any] = {
            "account": text,
            "key": key,
            "cost": units,
            "meter": meter,
            "now": at,
            "refunded": refunded,
        }
        self.counts["uses"] += 1
        if what > 0.93:
            self.late.append((self.now + draw.randrange(10, 70) * DAY, about))
        else:
            self._use(**about)

    def _use(self, *, refunded: bool, **about: Any) -> None:
        decision = use(configuration=ConfigVersion.read("default")[0], **about)
        assert decision.receipt is not None
        if refunded:
            engine.refund(decision.receipt)
        units: int = about["cost"]
        self.books.use(Use(about["account"], about["now"], about["meter"], units, units if refunded else 0))

    def overflow(self, group: Group) -> None:
        """Use nearly 2^63 units in a day, or more: as if a text made some millions of the largest requests."""
        text, bins = self.draw.choice(group.texts), {self.now // QUARTER * QUARTER + n * QUARTER for n in range(2)}
        self.flow()
        for at in sorted(bins)[: self.draw.choice((1, 2, 2))]:
            use(text, "api_key:0", cost=2, now=at, configuration=ConfigVersion.read("default")[0])
            add_units(text, LARGE - 2)
            self.books.use(Use(text, at, "requests", LARGE))
            self.flow()

    def flow(self, *, tallied: bool = True) -> None:
        """Bring all usage into the ledger, and into its totals. Only now does the server have to fsync."""
        self._always_fsync(True)
        opened_late()
        seal()
        drain(int(END_OF_CLOCKS.timestamp()) * SECOND)
        self._always_fsync(False)
        if tallied:
            tally()
            self.books.tally(self.now)

    def drain(self) -> None:
        """Bring all usage into the ledger. The next tally adds it to the totals."""
        self.flow(tallied=False)

    def close(self, *, everything: bool = False) -> None:
        """Close what can be closed. Sometimes the worker's clock, or the shards' watermark, is some days off."""
        for at, about in self.late:
            if everything or at <= self.now:
                self._use(**about)
        self.late = [(at, about) for at, about in self.late if not everything and at > self.now]
        self.flow()
        behind, ahead = (
            self.draw.choice((0, 0, self.draw.randrange(4 * 86_400))) * SECOND * (not everything) for _ in range(2)
        )
        ShardState.objects.update(watermark=self.now - behind)
        finalise(self.now - behind + ahead)
        self.books.close(self.now - behind, GRACE * SECOND)
        self.last_closing = self.now - behind + ahead
        self._take()

    def _take(self) -> None:
        self.files.take(self.now, self.books.large)
        for month in self.files.taken:
            self.taken_at.setdefault(month, self.now)

    # What people do

    def adjust(self, group: Group) -> None:
        """Adjust a period of a customer, perhaps of one whom no text names any more."""
        draw, text = self.draw, self.draw.choice(group.texts)
        at = self.now - draw.randrange(60 * 86_400) * SECOND
        customer = self.books.customer(text, at)
        if not self._is_made(customer):
            return
        start = self.books.customers[customer].periods.period(at)[0]
        units, meter = draw.choice((-500, *(draw.randrange(-40, 0) for _ in range(4)), 30)), draw.choice(METERS)
        about: dict[str, Any] = {"account": text, "customer_id": self.pk(customer), "meter": meter, "quantity": units}
        Adjustment.objects.create(period_start=moment(start), reason="x", author=self.author, **about)
        self.books.adjust(customer, start, meter, units, self.now)
        self.counts["adjustments"] += 1

    def pk(self, customer: int) -> int:
        """Return the primary key of a customer of the model."""
        if customer not in self.pks:
            text, since = next(
                (text, since) for text, names in self.books.names.items() for since, named in names if named == customer
            )
            self.pks[customer] = Name.objects.get(identifier=text, since=since // SECOND).customer_id
        return self.pks[customer]

    def move(self, group: Group) -> None:
        """Give a text, known or new, to a customer of the group or to a new one, from the next quarter or before."""
        draw = self.draw
        text = draw.choice(group.texts)
        if draw.random() < 0.3:
            text = f"{group.number}.{len(group.texts)}"
            group.texts.append(text)
        others = [customer for customer in group.customers if self._is_made(customer)]
        to = draw.choice([None, *others, *others])
        since = self._next_quarter()
        # The quarters at which something else happens: usage, another move, or the start of the present period.
        edges = [use.bin for use in self.books.uses.get(text, ())[-4:]]
        edges += [at for at, _customer in self.books.names.get(text, ())]
        edges += [self.books.customers[customer].periods.period(self.now)[0] for customer in others[:2]]
        what = draw.random()
        if what < 0.2:
            since -= draw.randrange(70 * 96) * QUARTER
        elif what < 0.6 and edges:
            since = min(draw.choice(edges), since)
        self._move(group, text, to, since)
        for at in (since - SECOND, since):
            if self.books.names.get(text, [])[-1:] == [(since, self.books.now(text))] and since > self.last_closing:
                self._use(
                    account=text, key="api_key:0", cost=draw.randrange(1, 60), meter="requests", now=at, refunded=False
                )

    def swap(self, group: Group) -> None:
        """Let two customers swap their texts."""
        texts = self.draw.sample(group.texts, min(len(group.texts), 2))
        owners = [self.books.names[text][-1][1] for text in texts if text in self.books.names]
        if len(set(owners)) == 2 and all(map(self._is_made, owners)):
            since = self._next_quarter()
            for text, to in zip(texts, reversed(owners), strict=True):
                self._move(group, text, to, since)

    def _is_made(self, customer: int) -> bool:
        """Return whether the app knows a customer yet: it makes one when it tallies its first usage."""
        if customer in self.pks:
            return True
        texts = [text for text, names in self.books.names.items() if (0, customer) in names]
        return Name.objects.filter(identifier__in=texts).exists()

    def _next_quarter(self) -> int:
        return (self.now // QUARTER + 1) * QUARTER

    def _move(self, group: Group, text: str, to: int | None, since: int) -> None:
        least, most = self.books.reported_until(text, to)
        try:
            moved = move(text, None if to is None else Customer.objects.get(pk=self.pk(to)), since // SECOND)
        except NotMovedError as error:
            self.counts["refused moves"] += 1
            if since >= most:
                self.found.append(f"{text} could not be moved to {since}: {error}")
            return
        if moved._state.adding:  # The customer has the text already, and all usage that can be moved.
            return
        if since < least:
            self.found.append(f"{text} was moved to {since}, although usage until {least} is on a report")
        former = self.books.now(text)
        customer = self.books.move(text, to, since, self.now)
        # A text that was the customer's already has another former customer, or none.
        for known, row in ((former, moved.former), (customer, moved.customer))[former == customer :]:
            assert row.pk is not None
            if self.pks.setdefault(known, row.pk) != row.pk:
                self.found.append(f"{text} was of customer {row.pk}, and not of {self.pks[known]}")
            if known not in group.customers:
                group.customers.append(known)
        self.counts["moves"] += 1

    def _rows(self, group: Group) -> tuple[int, list[str], QuerySet[Account]]:
        """Return a customer, its texts, and its rows in the table of accounts."""
        text = self.draw.choice(group.texts)
        customer = self.books.now(text)
        if self.draw.random() < 0.1 and group.customers:
            customer = self.draw.choice(group.customers)
        if customer not in group.customers:
            group.customers.append(customer)
        texts = self.books.texts(customer)
        waiting = [] if texts else [waiting_text(Customer.objects.get(pk=self.pk(customer)))]
        return customer, texts, Account.objects.filter(identifier__in=[*texts, *waiting])

    def edit_terms(self, group: Group) -> None:
        customer, texts, rows = self._rows(group)
        if self.draw.random() < 0.1:
            self._add_second(texts)
        periods, kind = self.books.customers[customer].periods, self.draw.choice(("zone", "anchor", "both", "delete"))
        zone, anchor = periods.zone, periods.anchor
        if kind in ("zone", "both"):
            zone = self.draw.choice(ZONES)
        if kind in ("anchor", "both"):
            anchor = self.draw.choice(ANCHORS)
        if kind == "delete" and self.draw.random() < 0.5:
            zone, anchor = "UTC", ""
            self._edit(customer, texts, rows, None)
        else:
            self._edit(customer, texts, rows, {"timezone": zone, "billing_anchor": anchor})

    def _add_second(self, texts: list[str]) -> None:
        """Try to add a row for another text of a customer with a row. This must be refused."""
        have = Account.objects.filter(identifier__in=texts)
        for text in sorted({*texts} - {*have.values_list("identifier", flat=True)}) if have.exists() else ():
            try:
                with edit_at(self._edit_moment()):
                    Account.objects.create(identifier=text, plan=Plan.objects.first())
            except SecondAccountError:
                continue
            self.found.append(f"the customer of {text} has got a second account")

    def edit_plan(self, group: Group) -> None:
        customer, texts, rows = self._rows(group)
        plan = self.draw.choice(["", *PLANS, *PLANS])
        self._edit(customer, texts, rows, {"plan": plan})

    def _edit(self, customer: int, texts: list[str], rows: QuerySet[Account], fields: dict[str, Any] | None) -> None:
        """Edit, delete or make the rows of a customer. The clock of this host is perhaps hours ahead."""
        found = list(rows.values_list("identifier", flat=True))
        if not found and (fields is None or not texts):
            return
        about, periods = self.books.customers[customer], self.books.customers[customer].periods
        now = self._edit_moment()
        seen = self._seen(texts, now)
        with edit_at(now):
            if fields is None:
                rows.delete()
                fields = {"timezone": "UTC", "billing_anchor": "", "plan": ""}
            else:
                row = dict(fields)
                if "plan" in row:
                    row["plan"] = Plan.objects.filter(slug=row["plan"]).first()
                if found:
                    rows.update(**row)
                else:
                    Account.objects.create(identifier=self.draw.choice(texts), **row)
        periods.edit(fields.get("timezone", periods.zone), fields.get("billing_anchor", periods.anchor), now)
        if fields.get("plan", about.plans[-1][1]) != about.plans[-1][1]:
            about.plans.append((now, fields["plan"]))
        if seen != self._seen(texts, now, seen):
            self.found.append(f"an edit of {texts} at {now} has moved periods")
        self.counts["edits"] += 1

    def _seen(self, texts: list[str], now: int, moments: Any = None) -> dict[int, Any]:
        """Return the app's periods of a customer at some moments from its first frozen period until now."""
        if not texts or (moments is None and self.draw.random() < 0.8):
            return {}
        (customer,) = named_now("default", texts[:1]).values()
        timeline = timelines_of("default", [customer])[customer.token]
        if moments is None:
            # Where a clock was ahead, the first frozen period can begin after `now`: none until now was used.
            first = timeline.frozen[0].start if timeline.frozen else now
            moments = [first + (now - first) * part // 20 for part in range(21)] if first < now else []
        return {at: timeline.at(at) for at in moments}

    def _edit_moment(self) -> int:
        """Return the moment of the next edit: each edit is later than the last one, and than the last closing."""
        clock = self.now + self.draw.choice((0, 0, 0, -20 * HOUR, 20 * HOUR))
        self.last_edit = max(clock, self.last_edit + SECOND, self.last_closing)
        return self.last_edit

    def disturb(self, group: Group) -> None:
        """Change the terms of a customer with raw SQL, so that nothing is frozen before."""
        customer, _texts, rows = self._rows(group)
        zone, anchor = self.draw.choice(ZONES), self.draw.choice(ANCHORS)
        if (
            QuerySet(Account)
            .filter(identifier__in=rows.values("identifier"))
            .update(timezone=zone, billing_anchor=anchor)
        ):
            periods = self.books.customers[customer].periods
            periods.zone, periods.anchor = zone, anchor

    def edit_offer(self) -> None:
        """Edit what a plan includes and charges."""
        self.offers.edit(self._edit_moment())
        self.counts["edits"] += 1

    def change_zones(self) -> None:
        """Install other time zone data, or the former ones again."""
        if self.books.zones:
            self.books.zones.clear()
            self.zones.restore()
        else:
            self.books.zones.update(CHANGED_ZONES)
            self.zones.install()


def add_units(text: str, units: int) -> None:
    """Add units to the only use of a text in the open batch of its shard."""
    server, shard = current_server(), account_shard(text, conf.SHARDS)
    client, open_batch = server.wire.client_of(server.keyspace, shard), server.keyspace.open(shard)
    counters: Any = client.hkeys(open_batch)
    (name,) = (name for name in counters if f"|{text}|".encode() in name and name.endswith(b"u"))
    client.hincrby(open_batch, name, units)
