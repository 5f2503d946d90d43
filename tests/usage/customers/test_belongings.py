"""Test what stays with a customer when its account texts change: overrides, blocks, allows, and its account row."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ratelimits.billing.reports.terms.account_book import AccountBook
from ratelimits.identity import Identity
from ratelimits.models import Access, Account, Customer, KeyOverride, Name, Plan, Rule
from ratelimits.models.accounts.named import named
from ratelimits.models.customers import is_waiting, make_missing, waiting_text
from ratelimits.rules import AppliedRule
from ratelimits.rules.grants import planned
from ratelimits.rules.loader import Loader
from ratelimits.usage.customers.move import move
from ratelimits.usage.models import AlertChannel
from tests.support.customers import present
from tests.support.reports.edits import edit_at
from tests.support.rows import rule
from tests.support.usage.traffic import at

pytestmark = pytest.mark.django_db(transaction=True)


def customer(text: str) -> Customer:
    make_missing("default", [text])
    return present("default", [text])[text]


class Processes:
    """Two processes: one has known the rules since the beginning of the test, the other one begins at each question."""

    def __init__(self) -> None:
        self._old = Loader()

    def ask(self, text: str) -> tuple[AppliedRule, bool]:
        """Return the rule "limit" for an account, and whether the account is blocked. The processes must agree."""
        identity, answers = Identity(account=f"account:{text}"), []
        for loader in (self._old, Loader()):
            snapshot = loader.reload()
            (applied,) = (one for one in snapshot.applicable("*", "GET", identity) if one.name == "limit")
            row = snapshot.access(identity)
            answers.append((applied, row is not None and row.blocks))
        one, two = answers
        assert (one[0].algorithm, one[0].plan, one[0].key_kind, one[1]) == (
            two[0].algorithm, two[0].plan, two[0].key_kind, two[1],
        )  # fmt: skip
        return one

    def capacity(self, text: str) -> Any:
        return self.ask(text)[0].algorithm.shown_limit

    def blocks(self, text: str) -> bool:
        return self.ask(text)[1]

    def plan(self, text: str) -> str:
        return self.ask(text)[0].plan


@pytest.fixture
def processes() -> Processes:
    rule("limit", "fixed_window", capacity=1, period=60, key_kind="account")
    found = Processes()
    found.ask("acme")
    return found


def override(text: str, capacity: int, **fields: Any) -> KeyOverride:
    return KeyOverride.objects.create(key=f"account:{text}", rule="limit", capacity=capacity, **fields)


def block(text: str) -> Access:
    return Access.objects.create(target=f"account:{text}", reason="has not paid")


def test_a_successor_gets_no_override_no_block_and_no_plan_and_the_customer_gets_them_back(
    processes: Processes,
) -> None:
    pro = Plan.objects.create(name="Pro", slug="pro")
    Rule.objects.create(name="limit", algorithm="fixed_window", capacity=50, period=60, key_kind="account", plan=pro)
    row = Account.objects.create(identifier="acme", plan=pro, timezone="Asia/Tokyo")
    channel = AlertChannel.objects.create(account=row, email="ada@example.com")
    override("acme", 100)
    block("acme")
    one = customer("acme")
    assert (processes.capacity("acme"), processes.blocks("acme"), processes.plan("acme")) == (100, True, "pro")
    move("acme")
    assert (processes.capacity("acme"), processes.blocks("acme"), processes.plan("acme")) == (1, False, "")
    assert KeyOverride.objects.get().key == f"account:{waiting_text(one)}"
    rows = Account.objects.values_list("pk", "identifier", "plan", "timezone")
    assert list(rows) == [(row.pk, waiting_text(one), pro.pk, "Asia/Tokyo")]
    assert not Name.objects.filter(identifier__startswith="=~").exists()
    channel.refresh_from_db()
    assert channel.account == row  # the successor's alerts do not go there
    move("x", one)
    assert (processes.capacity("x"), processes.blocks("x"), processes.plan("x")) == (100, True, "pro")
    assert KeyOverride.objects.get().key == Access.objects.get().target == "account:x"
    assert list(rows.all()) == [(row.pk, "x", pro.pk, "Asia/Tokyo")]


def test_a_renamed_customer_has_the_same_under_its_new_name_at_once(processes: Processes) -> None:
    pro = Plan.objects.create(name="Pro", slug="pro")
    row = Account.objects.create(identifier="acme", plan=pro, timezone="Asia/Tokyo")
    override("acme", 100)
    block("acme")
    one = customer("acme")
    move("x", one)
    for text in ("acme", "x"):
        assert (processes.capacity(text), processes.blocks(text)) == (100, True)
    move("acme")
    assert (processes.capacity("x"), processes.blocks("x")) == (100, True)
    assert (processes.capacity("acme"), processes.blocks("acme")) == (1, False)
    assert KeyOverride.objects.get().key == Access.objects.get().target == "account:x"
    assert list(Account.objects.values_list("pk", "identifier", "plan")) == [(row.pk, "x", pro.pk)]


def test_the_plan_of_a_customer_holds_for_all_its_texts_also_after_edits(processes: Processes) -> None:
    plans = {slug: Plan.objects.create(name=slug, slug=slug) for slug in ("free", "pro")}
    for number, plan in enumerate(plans.values()):
        Rule.objects.create(
            name="limit", algorithm="fixed_window", capacity=number + 7, period=60, key_kind="account", plan=plan
        )
    row = Account.objects.create(identifier="acme", plan=plans["free"])
    move("x", customer("acme"))
    assert [processes.plan(text) for text in ("acme", "x")] == ["free", "free"]
    row.plan = plans["pro"]
    row.save()
    assert [processes.plan(text) for text in ("acme", "x")] == ["pro", "pro"]
    Account.objects.update(plan=plans["free"])
    assert [processes.plan(text) for text in ("acme", "x")] == ["free", "free"]
    row.delete()
    assert [processes.plan(text) for text in ("acme", "x")] == ["", ""]
    Account.objects.create(identifier="x", plan=plans["pro"])
    assert [processes.plan(text) for text in ("acme", "x")] == ["pro", "pro"]


def test_a_grant_for_a_text_adds_to_the_plan_of_its_customer(processes: Processes) -> None:
    pro = Plan.objects.create(name="Pro", slug="pro")
    Rule.objects.create(name="limit", algorithm="fixed_window", capacity=50, period=60, key_kind="account", plan=pro)
    Account.objects.create(identifier="acme", plan=pro)
    move("x", customer("acme"))
    (granted,) = planned("account:x", "limit", 5, datetime.now(UTC) + timedelta(days=1))
    assert granted.capacity == 55


def test_rows_of_a_text_that_goes_do_not_overlap_with_those_of_the_text_that_stays(processes: Processes) -> None:
    now = datetime.now(UTC)
    override("acme", 100, valid_from=now - timedelta(days=7))
    override("acme", 70, valid_from=now - timedelta(days=9), valid_until=now - timedelta(days=8))
    move("x", customer("acme"))
    assert sorted(KeyOverride.objects.values_list("key", "capacity")) == [
        ("account:acme", 70), ("account:acme", 100), ("account:x", 100),
    ]  # fmt: skip
    KeyOverride.objects.filter(key="account:x").update(capacity=300)
    move("acme")
    assert sorted(KeyOverride.objects.values_list("key", "capacity")) == [("account:x", 70), ("account:x", 300)]
    assert processes.capacity("x") == 300
    assert processes.capacity("acme") == 1


def plans_of(who: Customer, *days: str) -> list[str]:
    """Return the plan of a customer on each of these days of 2026, for bills."""
    assert who.pk is not None
    (of_name,) = named("default", [who.pk])
    book = AccountBook("default", [of_name])
    states = (book.state(of_name, at(f"2026-{day}")) for day in days)
    names = dict(Plan.objects.values_list("pk", "slug"))
    return ["" if state is None or state.plan is None else names[state.plan] for state in states]


def test_a_move_into_the_past_changes_nobody_s_plan_of_that_time() -> None:
    plans = {slug: Plan.objects.create(name=slug, slug=slug) for slug in ("free", "pro", "gold")}
    with edit_at("2026-09-01"):
        for text, slug in (("acme", "free"), ("bolt", "pro")):
            Account.objects.create(identifier=text, plan=plans[slug])
    with edit_at("2026-10-10"):
        Account.objects.filter(identifier="acme").update(plan=plans["pro"])
    with edit_at("2026-10-20"):
        Account.objects.filter(identifier="bolt").update(plan=plans["gold"])
    one, two = customer("acme"), customer("bolt")
    days = ("10-04", "10-06", "10-15", "10-25", "11-15")
    before = plans_of(one, *days), plans_of(two, *days)
    assert before == (["free", "free", "pro", "pro", "pro"], ["pro", "pro", "pro", "gold", "gold"])
    moments = [at(f"2026-10-{day}") // 10**6 for day in ("05", "12", "22")]
    move("acme", two, moments[0])
    assert (plans_of(one, *days), plans_of(two, *days)) == before
    move("bolt", one, moments[1])
    assert (plans_of(one, *days), plans_of(two, *days)) == before
    third = move("acme", None, moments[2]).customer
    assert (plans_of(one, *days), plans_of(two, *days)) == before
    assert plans_of(third, *days) == [""] * len(days)


def test_the_plan_of_a_row_that_was_deleted_since_stays_with_the_former_customer() -> None:
    with edit_at("2026-09-01"):
        row = Account.objects.create(identifier="acme", plan=Plan.objects.create(name="pro", slug="pro"))
    with edit_at("2026-10-10"):
        row.delete()
    one, days = customer("acme"), ("10-04", "10-06", "10-15")
    assert plans_of(one, *days) == ["pro", "pro", ""]
    two = move("acme", None, at("2026-10-05") // 10**6).customer
    assert plans_of(one, *days) == ["pro", "pro", ""]
    assert plans_of(two, *days) == ["", "", ""]
    assert not Account.objects.exists()


def test_the_history_says_why_a_row_has_another_key(processes: Processes) -> None:
    row = override("acme", 100)
    move("acme")
    history: Any = KeyOverride.history
    newest = history.filter(id=row.pk).order_by("-history_id").first()
    assert newest.history_change_reason == "the account text was moved to another customer"
    assert is_waiting(newest.key.removeprefix("account:"))


@pytest.mark.parametrize("seed", range(4))
def test_after_any_moves_and_edits_each_text_has_what_was_written_for_its_customer(
    processes: Processes, seed: int
) -> None:
    chance, texts = random.Random(seed), ["acme", "bolt", "cord", "dart"]
    make_missing("default", texts)
    # The customer for whom each capacity was written, and those who were ever blocked.
    written: dict[int, int] = {}
    blocked: set[int] = set()
    for number in range(2, 30):
        text = chance.choice(texts)
        owner = customer(text).pk
        assert owner is not None
        what = chance.random()
        if what < 0.6:
            move(text, chance.choice([None, *Customer.objects.all()]))
        elif what < 0.8:
            rows = KeyOverride.objects.filter(key=f"account:{text}")
            if rows:
                rows.update(capacity=number)
            else:
                override(text, number)
            written[number] = owner
        elif what < 0.9:
            if not Access.objects.filter(target=f"account:{text}").exists():
                block(text)
            blocked.add(owner)
        else:
            Access.objects.filter(target=f"account:{text}").delete()
        for one in texts:
            capacity, pk = processes.capacity(one), customer(one).pk
            assert capacity == 1 or written[capacity] == pk
            assert pk in blocked or not processes.blocks(one)


class Plans:
    """Customers whose plans are edited and whose texts are moved, and what plan each had when: from nothing else."""

    TEXTS = ("acme", "bolt", "cord")

    def __init__(self) -> None:
        self.plans = {slug: Plan.objects.create(name=slug, slug=slug) for slug in ("free", "pro")}
        make_missing("default", self.TEXTS)
        self.day = 0
        #: By primary key of a customer: its plans, each from a day of 2026 on.
        self.had: dict[int | None, list[tuple[int, str]]] = {}

    def moment(self, day: int) -> int:
        return at("2026-01-01") + day * 86_400 * 10**6

    def edit(self, text: str, slug: str | None) -> None:
        """Give the customer of a text a plan ("" for none), or delete its account (None)."""
        self.day += 1
        own = customer(text)
        rows = Account.objects.filter(identifier__in=named("default", [own.pk or 0])[0].present)
        with edit_at(self.moment(self.day)):
            if slug is None:
                rows.delete()
            elif not rows.update(plan=self.plans.get(slug)):
                Account.objects.create(identifier=text, plan=self.plans.get(slug))
        self.had.setdefault(own.pk, []).append((self.day, slug or ""))

    def move(self, text: str, to: Customer | None, since: int) -> Customer:
        """Give a text to a customer from a day on."""
        return move(text, to, self.moment(since) // 10**6).customer

    def differences(self) -> list[str]:
        found = []
        for who in Customer.objects.all():
            assert who.pk is not None
            (of_name,) = named("default", [who.pk])
            book = AccountBook("default", [of_name])
            for day in range(self.day + 2):
                state = book.state(of_name, self.moment(day) + 1)
                slug = "" if state is None or state.plan is None else Plan.objects.get(pk=state.plan).slug
                wanted = next((slug for since, slug in reversed(self.had.get(who.pk, [])) if since <= day), "")
                if slug != wanted:
                    found.append(f"customer {who.pk} had {slug!r} on day {day}, and not {wanted!r}")
        return found


def test_two_moves_to_the_same_time_change_no_plan_of_the_past() -> None:
    world = Plans()
    first = customer("acme")
    world.edit("acme", "pro")
    second = world.move("acme", None, 2)
    world.move("acme", customer("bolt"), 1)
    assert world.differences() == []
    world.move("acme", first, 1)
    assert world.differences() == []
    world.edit("acme", "free")
    assert {who: [slug for _day, slug in had] for who, had in world.had.items()} == {first.pk: ["pro", "free"]}
    assert world.differences() == []
    assert second.pk not in world.had


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_moved_each_customer_has_had_the_plans_that_were_written_for_it(seed: int) -> None:
    chance, world = random.Random(seed), Plans()
    done = []
    for _step in range(20):
        text = chance.choice(world.TEXTS)
        if chance.random() < 0.5:
            slug = chance.choice(["free", "pro", "", None])
            world.edit(text, slug)
            done.append(f"edit {text} {slug!r}")
        else:
            to, since = chance.choice([None, *Customer.objects.order_by("pk")]), chance.randrange(world.day + 2)
            got = world.move(text, to, since)
            done.append(f"move {text} to {got.pk} since {since}")
        assert world.differences() == [], done
