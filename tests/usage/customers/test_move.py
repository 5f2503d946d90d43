"""Test moves: each text has one customer at each bin, and totals are what an independent model says."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from django.db import connection, transaction

from ratelimits.billing.models import Report
from ratelimits.billing.reports.verify.totals import verify_totals
from ratelimits.engine.keys import BIN_SECONDS
from ratelimits.models import ConfigVersion, Customer, Move, Name
from ratelimits.models.customers import make_missing
from ratelimits.models.versions import editing
from ratelimits.moments import now_of
from ratelimits.usage.customers.counting import closed_until, count_again
from ratelimits.usage.customers.move import move
from ratelimits.usage.customers.planning import NotMovedError, next_quarter
from ratelimits.usage.ledger import crash
from ratelimits.usage.ledger.drain import drain
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.ledger.tally import tally
from ratelimits.usage.models import PeriodUsage, ShardState
from tests.support.customers import present, resolve
from tests.support.reports.invoices import account, close, spend
from tests.support.selection import few
from tests.support.usage import traffic
from tests.support.usage.traffic import NOON, at, flow

pytestmark = pytest.mark.django_db

SECOND = 10**6
BIN = NOON // SECOND
#: Bins around the end of a month, so that texts move within periods and between them.
BINS = range(at("2026-10-31T21:00") // SECOND, at("2026-11-01T03:00") // SECOND, BIN_SECONDS)


@pytest.fixture(autouse=True)
def _edited() -> None:
    """Edit the configuration: a test whose first edit comes later leaves the usage of before in another namespace."""
    with editing("default"):
        pass


def use(text: str = "acme", **about: Any) -> None:
    decision = traffic.use(text, configuration=ConfigVersion.read("default")[0], **about)
    assert decision.allowed


def totals(**of: Any) -> dict[tuple[int, str], int]:
    """Return the units of each customer and text."""
    sums: Counter[tuple[int, str]] = Counter()
    for row in PeriodUsage.objects.filter(**of):
        sums[row.customer_id, row.account] += row.admitted_units
    return dict(sums)


def customer(text: str) -> Customer:
    return present("default", [text])[text]


def errors() -> list[str]:
    return list(verify_totals("default"))


@dataclass
class Model:
    """What happened, and nothing else: each move in the order in which it was made, and each use."""

    moves: list[tuple[str, int, int]] = field(default_factory=list)
    uses: list[tuple[str, int, int]] = field(default_factory=list)

    def customer(self, text: str, bin_: int, first: dict[str, int]) -> int:
        made = (to for moved, since, to in reversed(self.moves) if moved == text and since <= bin_)
        return next(made, first[text])

    def totals(self, first: dict[str, int]) -> dict[tuple[int, str], int]:
        sums: Counter[tuple[int, str]] = Counter()
        for text, bin_, units in self.uses:
            sums[self.customer(text, bin_, first), text] += units
        return dict(sums)


@pytest.mark.parametrize("seed", few(range(6), 0, 1))
def test_any_moves_and_uses_in_any_order_give_the_totals_of_the_model(seed: int) -> None:
    chance, model, texts = random.Random(seed), Model(), ["acme", "bolt", "cord", "user:4"]
    # The customers whom the texts name before the first move.
    first: dict[str, int] = {}
    for number in range(70):
        text, bin_ = chance.choice(texts), chance.choice(BINS)
        what = chance.random()
        if what < 0.6:
            units, moment = chance.randrange(1, 9), (bin_ + chance.randrange(BIN_SECONDS)) * SECOND
            use(text, key=f"api_key:{number}", cost=units, meter=chance.choice(("requests", "tokens")), now=moment)
            model.uses.append((text, bin_, units))
        elif what < 0.75:
            flow()
        else:
            make_missing("default", [text])
            first.setdefault(text, Name.objects.get(identifier=text, since=0).customer_id)
            to = chance.choice([None, *Customer.objects.all()])
            since = chance.choice([bin_, bin_, 0])
            moved = move(text, to, since)
            assert moved.customer.pk is not None
            model.moves.append((text, since, moved.customer.pk))
            assert to is None or moved.customer == to
    flow()
    for text in texts:
        first.setdefault(text, Name.objects.get(identifier=text, since=0).customer_id)
    uses = [(text, bin_) for text in texts for bin_ in (0, *BINS)]
    assert {use: found.pk for use, found in resolve("default", uses).items()} == {
        (text, bin_): model.customer(text, bin_, first) for text, bin_ in uses
    }
    for text in texts:
        rows = Name.objects.filter(identifier=text).order_by("since").values_list("since", "until")
        starts, ends = zip(*rows, strict=True)
        assert (*starts, None) == (0, *ends)
    incremental = totals()
    assert incremental == model.totals(first)
    tallied = dict(ShardState.objects.values_list("shard", "tallied"))
    for text in texts:
        count_again("default", text, 0, tallied)
    assert totals() == incremental
    assert sum(incremental.values()) == sum(units for _text, _bin, units in model.uses)
    assert errors() == []


def test_by_default_a_text_moves_at_the_next_quarter_of_the_database_s_clock() -> None:
    before = now_of("default").timestamp()
    moved = move("acme")
    assert moved.since % BIN_SECONDS == 0
    assert before < moved.since <= now_of("default").timestamp() + BIN_SECONDS
    assert moved.former != moved.customer == customer("acme")
    assert resolve("default", [("acme", moved.since - 1)])["acme", moved.since - 1] == moved.former


def test_a_renamed_customer_keeps_its_bill_and_its_former_name_can_be_taken_by_another() -> None:
    use("a", cost=150)
    flow()
    one = customer("a")
    move("x", one, BIN + 900)
    move("a", None, BIN + 900)
    two = customer("a")
    use("x", cost=50, now=NOON + 1000 * SECOND)
    use("a", cost=10, now=NOON + 1000 * SECOND)
    flow()
    assert totals() == {(one.pk, "a"): 150, (one.pk, "x"): 50, (two.pk, "a"): 10}
    assert errors() == []


def test_two_customers_swap_their_texts_and_two_become_one() -> None:
    make_missing("default", ["a", "b"])
    one, two = customer("a"), customer("b")
    move("a", two, BIN)
    move("b", one, BIN)
    for text, units in (("a", 1), ("b", 10)):
        use(text, cost=units)
    flow()
    assert totals() == {(two.pk, "a"): 1, (one.pk, "b"): 10}
    move("a", one, BIN)
    assert totals() == {(one.pk, "a"): 1, (one.pk, "b"): 10}
    assert list(Name.objects.filter(identifier="a").values_list("since", "customer")) == [(0, one.pk)]
    assert errors() == []


def test_usage_that_no_tally_has_seen_stays_with_the_text_s_own_customer() -> None:
    use("new", cost=7, now=NOON)
    make_missing("default", ["acme"])
    acme = customer("acme")
    moved = move("new", acme)
    flow()
    assert moved.former != acme
    assert totals() == {(moved.former.pk, "new"): 7}
    move("new", acme, 0)
    assert totals() == {(acme.pk, "new"): 7}


def test_batches_that_are_not_tallied_yet_are_counted_once() -> None:
    use(cost=3)
    flow()
    use(cost=4, now=NOON + 900 * SECOND)
    seal()
    drain(at("2100-01-01"))
    moved = move("acme", None, BIN)
    assert totals() == {(moved.customer.pk, "acme"): 3}
    tally()
    assert totals() == {(moved.customer.pk, "acme"): 7}
    assert errors() == []


def test_no_text_moves_into_a_period_of_its_new_customer_that_has_a_report() -> None:
    spend(account(), "2026-10-20", 5)
    close("2026-11-03")
    november = at("2026-11-01") // SECOND
    with pytest.raises(NotMovedError):
        move("bolt", customer("acme"), november - 900)
    assert move("bolt", customer("acme"), november).since == november


def test_usage_of_a_period_that_ends_with_the_move_is_not_counted_again() -> None:
    """Three customers have the text one after the other; the periods of the second one begin on the 15th."""
    account()
    account("cord", billing_anchor="2026-01-15T00:00")
    first = customer("acme")
    second = move("acme", customer("cord"), at("2026-10-20") // SECOND).customer
    for day, units in (("2026-10-16", 1), ("2026-10-25", 10), ("2026-11-02", 100)):
        use(cost=units, now=at(day))
    flow()
    third = move("acme", None, at("2026-11-01") // SECOND).customer
    assert totals() == {(first.pk, "acme"): 1, (second.pk, "acme"): 10, (third.pk, "acme"): 100}
    assert errors() == []


def test_a_move_that_changes_nothing_is_no_edit() -> None:
    make_missing("default", ["acme"])
    version = ConfigVersion.read("default")[0]
    move("acme", customer("acme"), BIN)
    assert ConfigVersion.read("default")[0] == version
    moved = move("acme", None, BIN)
    assert Name.objects.get(since=BIN).version == ConfigVersion.read("default")[0] == version + 1
    move("acme", moved.customer, BIN)
    move("acme", moved.customer, BIN + 900)
    assert ConfigVersion.read("default")[0] == version + 1
    assert Name.objects.filter(identifier="acme").count() == 2


def test_a_later_customer_is_replaced() -> None:
    make_missing("default", ["acme"])
    own = customer("acme")
    move("acme", None, BIN)
    move("acme", own, BIN - 900)
    assert list(Name.objects.filter(identifier="acme").values_list("since", "customer")) == [(0, own.pk)]


def test_moments_that_are_no_quarter_or_too_late_are_refused() -> None:
    following = next_quarter("default")
    for since in (BIN + 1, -900, following + 900):
        with pytest.raises(NotMovedError):
            move("acme", None, since)
    assert not Name.objects.exists()
    move("acme", None, following)


def test_anonymous_usage_belongs_to_nobody() -> None:
    make_missing("default", ["acme", ""])
    with pytest.raises(NotMovedError):
        move("", customer("acme"))
    with pytest.raises(NotMovedError):
        move("acme", customer(""))


def test_a_typed_text_is_moved_as_requests_have_it() -> None:
    assert move("~ada").text == "=~ada"


def test_usage_on_a_report_stays_with_its_customer() -> None:
    payer = account()
    spend(payer, "2026-10-20", 5)
    spend(payer, "2026-11-02", 7)
    close("2026-11-03")
    assert Report.objects.count() == 1
    november = at("2026-11-01") // SECOND
    assert closed_until("default", "acme") == november
    with pytest.raises(NotMovedError, match="2026-11-01 00:00 UTC"):
        move("acme", None, november - 900)
    former = customer("acme")
    moved = move("acme", None, november)
    assert moved.counted_again
    assert totals() == {(former.pk, "acme"): 5, (moved.customer.pk, "acme"): 7}
    assert errors() == []


def test_a_total_of_the_wrong_customer_is_found() -> None:
    use()
    flow()
    moved = move("acme")
    assert errors() == []
    PeriodUsage.objects.update(customer=moved.customer)
    assert f"acme, customer {moved.former.pk} (requests, rule 1) from 2026-11-01T00:00:00Z in shard" in errors()[0]
    PeriodUsage.objects.update(customer=moved.former)
    Name.objects.filter(since=0).update(customer=moved.customer)
    assert "which no row of the billing periods contains" in "".join(errors())


def test_names_that_do_not_follow_each_other_are_found() -> None:
    move("acme")
    names = Name.objects.order_by("since")
    assert errors() == []
    for changed in ({"until": None, "since": 900}, {"until": BIN}):
        with transaction.atomic():
            names.exclude(since=0).delete()
            Name.objects.update(**changed)
            assert errors() == ["the names of acme do not follow each other: nobody knows who has some of its usage"]
            transaction.set_rollback(True)


@pytest.mark.parametrize("step", crash.MOVE_STEPS)
def test_a_move_that_ends_at_any_step_is_made_wholly_or_not_at_all(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(cost=3)
    flow()
    former = customer("acme")

    def die(reached: str) -> None:
        if reached == step:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(crash, "reached", die)
        with pytest.raises(KeyboardInterrupt):
            move("acme", None, BIN)
    made = step == "move:committed"
    assert Name.objects.count() == 1 + made
    assert (former.pk, "acme") in totals() or made
    assert errors() == []
    moved = move("acme", customer("acme") if made else None, BIN)
    assert totals() == {(moved.customer.pk, "acme"): 3}
    assert errors() == []


def _in_thread(work: Callable[[], Any]) -> Any:
    try:
        return work()
    finally:
        connection.close()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("tallies_first", [True, False])
def test_a_tally_and_a_move_that_meet_count_each_unit_for_one_customer(
    tallies_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        use(cost=10**number, now=NOON + number * 900 * SECOND)
    seal()
    drain(at("2100-01-01"))
    first_is_inside, released = threading.Event(), threading.Event()
    pause = "tally:periods-frozen" if tallies_first else "move:named"

    def stop_inside(step: str) -> None:
        if step == pause:
            first_is_inside.set()
            released.wait(30)

    monkeypatch.setattr(crash, "reached", stop_inside)
    works: list[Callable[[], Any]] = [lambda: tally(wait=True), lambda: move("acme", None, BIN + 1800)]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(_in_thread, works[not tallies_first])
        assert first_is_inside.wait(30)
        second = pool.submit(_in_thread, works[tallies_first])
        assert not second.done()
        released.set()
        first.result(60)
        second.result(60)
    monkeypatch.undo()
    tally()
    former = Name.objects.get(since=0).customer_id
    assert totals() == {(former, "acme"): 11, (customer("acme").pk, "acme"): 11100}
    assert errors() == []


@pytest.mark.django_db(transaction=True)
def test_moves_and_tallies_that_meet_in_any_order_lose_no_unit() -> None:
    texts = ["acme", "bolt"]
    for number in range(24):
        use(texts[number % 2], key=f"api_key:{number}", cost=number + 1, now=NOON + number * 900 * SECOND)
        if number % 3 == 0:
            seal()
    make_missing("default", texts)
    customers = [*Customer.objects.all(), Customer.objects.create()]
    together = threading.Barrier(3)

    def moves(seed: int) -> list[Move]:
        chance, made = random.Random(seed), []
        together.wait()
        for _number in range(5):
            since = BIN + 900 * chance.randrange(24)
            made.append(move(chance.choice(texts), chance.choice(customers), since))
        return made

    def tallies() -> None:
        together.wait()
        seal()
        for _number in range(3):
            drain(at("2100-01-01"))
            tally()

    with ThreadPoolExecutor(3) as pool:
        works = [pool.submit(_in_thread, partial(moves, seed)) for seed in (1, 2)]
        works.append(pool.submit(_in_thread, tallies))
        for work in works:
            work.result(120)
    flow()  # perhaps a drain has left out what a move had locked
    expected: Counter[tuple[int, str]] = Counter()
    bins = [(texts[number % 2], BIN + number * 900) for number in range(24)]
    found = resolve("default", bins)
    for number, used in enumerate(bins):
        expected[found[used].pk, used[0]] += number + 1
    assert totals() == dict(expected)
    assert errors() == []
