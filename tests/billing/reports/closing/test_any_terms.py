"""Test accounts whose terms change in any way at any time, against a separate model of months, rows and fractions.

Each account is a family of names, and each name is a customer: its row is made, gets another name, is deleted and made
again, is put on other plans, anchors and time zones, while requests come under its names, some of which reach the
ledger only after their period was closed.
"""

from __future__ import annotations

from calendar import monthrange
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from itertools import pairwise
from random import Random
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import redis
from django.db.models import Sum
from django.test import override_settings

from ratelimits.billing.models import Report, ReportLine
from ratelimits.billing.reports.closing.close import finalise
from ratelimits.billing.reports.verify.report import ReportVerifier
from ratelimits.billing.reports.verify.terms import verify_terms
from ratelimits.models import Account, FrozenPeriod, Plan, versions
from ratelimits.rules.loader import Loader
from ratelimits.usage.models import Line, ShardState
from tests.support.plain import PLAIN
from tests.support.reports.edits import edit_at, plan
from tests.support.reports.files import MonthlyFiles
from tests.support.usage.traffic import flow, use

ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Pacific/Kiritimati", "Pacific/Pago_Pago", "Asia/Kolkata")
ANCHORS = ("", "", "2024-01-31T06:00", "2024-01-02T00:00", "2024-01-15T12:30", "2024-02-29T23:45")
INCLUDED = {"small": 40, "middle": 101, "large": 1000}
SECOND = 1_000_000
DAY = 86_400 * SECOND
FIRST = datetime(2025, 1, 1, tzinfo=UTC)


def micros(moment: datetime) -> int:
    return int(moment.timestamp()) * SECOND


@dataclass
class State:
    """The values of an account row from a moment on; `name` is empty after the row is deleted."""

    since: int
    name: str
    plan: str
    timezone: str
    anchor: str


@dataclass
class Family:
    """The names of one account, the states of each row that it had, and the requests under its names."""

    number: int
    names: list[str]
    rows: dict[int, list[State]] = field(default_factory=dict)
    #: Name, time (µs), units, and whether the request reached the ledger in time.
    uses: list[tuple[str, int, int, bool]] = field(default_factory=list)

    def row(self) -> int | None:
        """Return the current row."""
        return next((pk for pk, states in self.rows.items() if states[-1].name), None)


class LoaderHere(Loader):
    """Read the rules in the caller's thread and over its connection: nothing else happens meanwhile."""

    def _submit(self, job: Callable[[Any], Any], argument: Any) -> Future[Any]:
        done = Future[Any]()
        done.set_result(job(argument))
        return done

    def _ask(self, query: Callable[[], Any]) -> Any:
        return query()


class World:
    """Draw events at random, carry them out for real, and record them for the model."""

    def __init__(self, draw: Random, families: int, months: int, server: redis.Redis) -> None:
        self.draw, self.months, self.server = draw, months, server
        self.families = [Family(number, [f"{number}"]) for number in range(families)]
        self.now = micros(FIRST)
        self.plans = {slug: plan(slug, quantity) for slug, quantity in INCLUDED.items()}
        self.loader = LoaderHere(lambda: self.now)
        self.late: list[tuple[int, dict[str, Any]]] = []
        self.edits = 0
        self.files = MonthlyFiles(f"{FIRST:%Y-%m}", push="stripe")

    def run(self) -> None:
        for _at, act, family in sorted(self.planned(), key=lambda each: each[0]):
            self.now = _at
            act(family) if family is not None else act()
        end = self.now
        for _step in range(4):
            self.now += 35 * DAY
            self.close(everything=True)
        self.files.take(self.now + 80 * DAY)
        self.now = end

    def planned(self) -> Iterator[tuple[int, Any, Any]]:
        draw = self.draw
        for month in range(self.months):
            start = micros(FIRST + timedelta(days=30.44 * month)) // SECOND * SECOND
            for family in self.families:
                if draw.random() < 0.7:
                    yield from (
                        (start + draw.randrange(30 * DAY), self.use, family) for _ in range(draw.randrange(1, 5))
                    )
                if draw.random() < 0.3:
                    at = start + draw.randrange(29 * DAY)
                    # Several edits follow each other at once, before any usage reaches the ledger.
                    for number in range(draw.choice((1, 1, 1, 2, 3))):
                        yield at + number * 60 * SECOND, self.edit, family
                        yield at + number * 60 * SECOND + SECOND, self.use, family
            for day in range(2, 30, 5):
                yield start + day * DAY, self.flow, None
            for day in (3, 17):
                yield start + day * DAY + SECOND, self.close, None

    def use(self, family: Family) -> None:
        name = family.names[-1] if self.draw.random() < 0.9 else self.draw.choice(family.names)
        units, late = self.draw.randrange(1, 60), self.draw.random() < 0.05
        about: dict[str, Any] = {
            "account": name,
            "key": f"api_key:{self.draw.randrange(2)}",
            "cost": units,
            "now": self.now,
            "configuration": self.loader.current().version,
        }
        family.uses.append((name, self.now, units, not late))
        if late:
            self.late.append((self.now + self.draw.randrange(10, 60) * DAY, about))
        else:
            use(**about)

    def flow(self) -> None:
        """Bring all usage into the ledger; only now does the server have to fsync."""
        self.server.config_set("appendfsync", "always")
        flow()
        self.server.config_set("appendfsync", "everysec")

    def close(self, *, everything: bool = False) -> None:
        due = [about for at, about in self.late if everything or at <= self.now]
        self.late = [(at, about) for at, about in self.late if not everything and at > self.now]
        for about in due:
            use(**{**about, "configuration": self.loader.current().version})
        self.flow()
        ShardState.objects.update(watermark=self.now)
        finalise(self.now)
        self.files.take(self.now)

    def edit(self, family: Family) -> None:
        draw, pk = self.draw, family.row()
        with edit_at(self.now):
            if pk is None:
                state = State(self.now, family.names[-1], draw.choice(["", *INCLUDED]), *self.months_of())
                row = Account.objects.create(identifier=state.name, **self.fields(state))
                family.rows[row.pk] = [state]
            else:
                last, kind = family.rows[pk][-1], draw.choice(("plan", "plan", "zone", "anchor", "name", "delete"))
                state = State(self.now, last.name, last.plan, last.timezone, last.anchor)
                if kind == "plan":
                    state.plan = draw.choice(["", *INCLUDED])
                elif kind == "zone":
                    state.timezone = draw.choice(ZONES)
                elif kind == "anchor":
                    state.anchor = draw.choice(ANCHORS)
                elif kind == "name":
                    known = draw.random() < 0.3
                    state.name = draw.choice(family.names) if known else f"{family.number}-{len(family.names)}"
                    family.names = [*(name for name in family.names if name != state.name), state.name]
                    # Requests have another name from now on: its row comes with a later edit.
                    state.name = ""
                else:
                    state.name = ""
                rows = Account.objects.filter(pk=pk)
                if state.name:
                    rows.update(**self.fields(state))
                else:
                    rows.delete()
                family.rows[pk].append(state)
        self.edits += 1
        self.loader.reload()

    def months_of(self) -> tuple[str, str]:
        return self.draw.choice(ZONES), self.draw.choice(ANCHORS)

    def fields(self, state: State) -> dict[str, Any]:
        chosen: Plan | None = self.plans.get(state.plan)
        return {"plan": chosen, "timezone": state.timezone, "billing_anchor": state.anchor}


# The model: what a period includes, worked out only from the states.


@dataclass(frozen=True)
class Stay:
    row: int
    name: str
    since: int
    until: int
    state: tuple[str, str, str]


def stays(family: Family, start: int, end: int) -> list[Stay]:
    """Return which row had which name, and was on which plan, between two moments."""
    found = []
    for row, states in family.rows.items():
        edges = [*(state.since for state in states), 2**62]
        for state, (since, until) in zip(states, pairwise(edges), strict=True):
            since, until = max(since, start), min(until, end)
            if state.name and since < until:
                found.append(Stay(row, state.name, since, until, (state.plan, state.timezone, state.anchor)))
    return found


def giver(family: Family, name: str, start: int, end: int) -> str:
    """Return the plan from which a name's allowance in a period comes: its last one; "" for none."""
    mine = [stay for stay in stays(family, start, end) if stay.name == name and stay.state[0]]
    last = max(mine, key=lambda stay: (stay.until, stay.since), default=None)
    return "" if last is None else last.state[0]


def month_around(zone: str, anchor: str, at: int) -> tuple[int, int]:
    """Return the month (µs) around a moment."""
    fixed = datetime.fromisoformat(anchor) if anchor else datetime(2024, 1, 1)
    local = datetime.fromtimestamp(at // SECOND, ZoneInfo(zone))

    def start(number: int) -> int:
        year, month = divmod(number, 12)
        day = min(fixed.day, monthrange(year, month + 1)[1])
        return micros(fixed.replace(year=year, month=month + 1, day=day, tzinfo=ZoneInfo(zone)))

    number = local.year * 12 + local.month
    while start(number) > at:
        number -= 1
    return start(number), start(number + 1)


def included(family: Family, name: str, start: int, end: int, *, by_time: bool) -> int:
    if not by_time:
        return INCLUDED.get(giver(family, name, start, end), 0)
    mine = [stay for stay in stays(family, start, end) if stay.name == name]
    at_end = next((stay.state[1:] for stay in mine if stay.until == end), ("UTC", ""))
    months = [month_around(*terms, end - 1) for terms in (at_end, *(s.state[1:] for s in sorted(mine, key=_since)))]
    whole = next((month for month in months if month[1] == end), months[0])
    length = end - start if (start, end) in months else whole[1] - whole[0]
    total = sum(Fraction(INCLUDED.get(stay.state[0], 0) * (stay.until - stay.since), length) for stay in mine)
    return int(total + Fraction(1, 2))


def _since(stay: Stay) -> int:
    return stay.since


class Findings:
    """Compare the reports with the model."""

    def __init__(self, world: World, *, by_time: bool) -> None:
        self.world, self.by_time = world, by_time
        self.family = {name: family for family in world.families for name in family.names}
        self.reports: dict[str, dict[int, Report]] = defaultdict(dict)
        for report in Report.objects.filter(version=1).order_by("period_start"):
            self.reports[report.account][report.period_start] = report
        self.found: list[str] = []
        self.units = 0
        columns = ("report__account", "usage_period")
        sums = ReportLine.objects.values_list(*columns).order_by().annotate(Sum("consumed_quantity"))
        #: Units by account and start of the billing period.
        self.consumed = {(name, start * SECOND): units for name, start, units in sums}

    def all(self) -> list[str]:
        self.usage()
        for name, reports in self.reports.items():
            self.billing_periods(name, list(reports.values()))
        for family in self.world.families:
            self.allowances(family)
        self.found += self.world.files.differences(self.came_late)
        return self.found

    def came_late(self, report: Report) -> bool:
        """Return whether all usage of a report came late: perhaps it came after the month's file was taken."""
        used = self.family[report.account].uses
        within = [early for name, at, _units, early in used if name == report.account and self.is_in(at, report)]
        return not any(within)

    def is_in(self, at: int, report: Report) -> bool:
        return bool(report.period_start <= at < report.period_end)

    def usage(self) -> None:
        """Check that every unit of the ledger is on exactly one report, and that the ledger has what was sent."""
        periods = FrozenPeriod.objects.values_list("customer__names__identifier", "start", "end")
        frozen: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for name, start, end in periods:
            frozen[name].append((start // SECOND, end // SECOND))
        about = ("account", "bin", "key", "meter", "rule", "version")
        ledger: Counter[tuple[Any, ...]] = Counter()
        for name, bin_, *rest, units in Line.objects.values_list(*about).annotate(Sum("admitted_units")):
            (start,) = [start for start, end in frozen[name] if start <= bin_ < end]
            ledger[name, start, *rest] += units
        columns = ("report__account", "usage_period", "key", "meter", "rule_id", "rule_version")
        lines = ReportLine.objects.values_list(*columns).annotate(Sum("consumed_quantity"))
        reported = {tuple(row[:-1]): row[-1] for row in lines}
        self.units = sum(ledger.values())
        if ledger != reported:
            differing = {key for key in ledger.keys() | reported.keys() if ledger.get(key) != reported.get(key)}
            self.found += [f"{key}: ledger {ledger.get(key)}, reports {reported.get(key)}" for key in differing]
        sent = sum(units for family in self.world.families for _name, _at, units, _early in family.uses)
        if sent != self.units:
            self.found.append(f"{sent} units were sent, the ledger has {self.units}")

    def billing_periods(self, name: str, reports: list[Report]) -> None:
        """Check that no periods overlap, none is too long, and each request is billed in the period of its time."""
        spans = [(report.period_start, report.period_end) for report in reports]
        for start, end in spans:
            if not 0 < end - start <= 36 * DAY:
                self.found.append(f"{name}: a period from {start} to {end}")
        self.found += [f"{name}: {one} and {other} overlap" for one, other in pairwise(spans) if one[1] > other[0]]
        units: Counter[tuple[int, int]] = Counter()
        for user, at, count, _early in self.family[name].uses:
            if user == name:
                span = next((span for span in spans if span[0] <= at < span[1]), (0, 0))
                units[span] += count
                if span == (0, 0):
                    self.found.append(f"{name}: {count} units at {at} lie in no period")
        for start, end in spans:
            total = self.consumed.get((name, start), 0)
            if total != units[start, end]:
                self.found.append(f"{name}: {total} units from {start} to {end}, and {units[start, end]} were used")

    def allowances(self, family: Family) -> None:
        """Check that every period has one allowance, and not one unit more is included."""
        net, taken = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
        sums = ReportLine.objects.filter(report__account__in=family.names).order_by("report_id", "number")
        for name, period, consumed, part in sums.values_list(
            "report__account", "usage_period", "consumed_quantity", "included_quantity"
        ):
            net[name, period * SECOND] += consumed
            taken[name, period * SECOND] += part
        for name in family.names:
            for start, report in self.reports[name].items():
                allowance = included(family, name, start, report.period_end, by_time=self.by_time)
                if (part := taken[name, start]) != (wanted := min(allowance, net[name, start])):
                    self.found.append(f"{name}: {part} units included from {start}, and not {wanted}")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("late_usage", ["version", "period"])
@pytest.mark.parametrize("proration", ["none", "time"])
def test_whatever_becomes_of_the_terms(
    late_usage: str, proration: str, long_run: bool, redis_client: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    """Try 2,000 accounts over 24 months with `--long`, 500 for each pair of settings; otherwise a few of them."""
    chosen: dict[str, Any] = {
        "LATE_USAGE": late_usage,
        "PRORATION": proration,
        "SHARDS": 4,
        "RELOAD_INTERVAL": 300_000_000,
    }
    chosen["PUSH"] = {"stripe": {"KEY": "sk_test", "SINCE": "2025-03"}}
    with override_settings(RATELIMITS={**PLAIN, **chosen}):
        size = (500, 24) if long_run else (3, 4)
        world = World(Random(f"{late_usage} {proration}"), *size, redis_client)
        world.run()
        findings = Findings(world, by_time=proration == "time")
        found = findings.all()
        verifier = ReportVerifier("default")
        for report in Report.objects.order_by("pk")[:: 10 if long_run else 1]:
            found += verifier.findings(report)
        found += verify_terms("default", Counter())
    with capsys.disabled():
        print(
            f"\n{len(world.families)} accounts over {world.months} months ({late_usage}, {proration}):"
            f" {world.edits} edits, {findings.units} units, {Report.objects.count()} reports, {len(found)} differences"
        )
    assert found == []
    assert versions.ConfigVersion.read("default")[0] > world.edits
