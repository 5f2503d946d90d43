"""Test that validity periods apply at the present time, however long ago the rows were read."""

from __future__ import annotations

from datetime import UTC, datetime
from random import Random
from typing import Any

import pytest

from ratelimits.identity import Identity
from ratelimits.models import Account, KeyOverride, Plan, PlanMembership
from ratelimits.rules.loader import Loader
from tests.rules.conftest import Clock
from tests.support.rows import rule

pytestmark = pytest.mark.django_db(transaction=True)

START = 1_800_000_000


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def blocks(loader: Loader, identity: Identity) -> bool:
    [applied] = loader.current().applicable("*", "GET", identity)
    return applied.algorithm.shown_limit == 1


@pytest.fixture
def loader(clock: Clock, settings: Any) -> Loader:
    """Return a loader whose rules were read hours ago: only the time can change what applies."""
    settings.RATELIMITS = {**settings.RATELIMITS, "RELOAD_INTERVAL": 10**6}
    return Loader(clock)


def test_a_block_that_began_after_the_rules_were_read_holds_from_the_first_request_on(
    loader: Loader, clock: Clock
) -> None:
    rule()
    KeyOverride.objects.create(key="user:1", rule="burst", capacity=1, valid_from=at(START + 3600))
    loader.current()
    clock.seconds = START + 3601
    assert [blocks(loader, Identity(user="user:1")) for _ in range(8)] == [True] * 8


def test_an_override_that_ended_meanwhile_holds_no_more(loader: Loader, clock: Clock) -> None:
    rule()
    KeyOverride.objects.create(key="user:1", rule="burst", capacity=1, valid_until=at(START + 3600))
    loader.current()
    clock.seconds = START + 3600
    assert not blocks(loader, Identity(user="user:1"))


def test_a_snapshot_is_good_until_the_next_edge_after_the_first_touch(loader: Loader, clock: Clock) -> None:
    rule()
    KeyOverride.objects.create(
        key="user:1", rule="burst", capacity=1, valid_from=at(START + 10), valid_until=at(START + 20)
    )
    snapshot = loader.current()
    clock.seconds = START + 15
    assert blocks(loader, Identity(user="user:1"))
    assert loader.current() is snapshot
    assert snapshot.good_until == (START + 20) * 1_000_000
    clock.seconds = START + 20
    assert not blocks(loader, Identity(user="user:1"))


def test_a_clock_that_is_put_back_behind_the_first_touch_has_it_looked_at_again(loader: Loader, clock: Clock) -> None:
    rule()
    KeyOverride.objects.create(key="user:1", rule="burst", capacity=1, valid_from=at(START + 3600))
    loader.current()
    clock.seconds = START + 3601
    assert blocks(loader, Identity(user="user:1"))
    clock.seconds = START + 1800
    assert not blocks(loader, Identity(user="user:1"))


def test_billing_periods_and_calendars_are_those_of_now(loader: Loader, clock: Clock) -> None:
    rule("monthly", "calendar_window")
    Account.objects.create(identifier="7")
    snapshot = loader.current()
    clock.seconds = START + 86_400 * 45
    snapshot.applicable("*", "GET", Identity(user="user:1", account="account:7"))
    _previous, now, following, _later = snapshot.billing("account:7").boundaries
    assert now <= clock() < following
    assert loader.current() is snapshot
    assert snapshot.good_until == following


@pytest.mark.parametrize("seed", range(4))
def test_at_any_moment_it_answers_as_a_snapshot_made_this_very_moment(loader: Loader, clock: Clock, seed: int) -> None:
    draw = Random(seed)
    plans = [Plan.objects.create(name=name, slug=name) for name in ("pro", "team")]
    rule("burst", capacity=5)
    rule("monthly", "calendar_window", timezone="Europe/Berlin")
    for number, plan in enumerate(plans):
        rule("burst", plan=plan, capacity=50 + number)
    for number in range(12):
        begins, ends = sorted(draw.sample(range(START, START + 3000), 2))
        valid = {"valid_from": at(begins), "valid_until": at(ends)}
        KeyOverride.objects.create(key=f"user:{number}", rule="burst", capacity=draw.choice((1, 7)), **valid)
        PlanMembership.objects.create(key=f"user:{number}", plan=draw.choice(plans), **valid)
    made_now = Loader(clock)

    def answer(one: Loader, identity: Identity) -> Any:
        snapshot = one.current()
        applied = snapshot.applicable("*", "GET", identity)
        return [(each.name, each.algorithm, each.plan) for each in applied], snapshot.billing(None)

    for _ in range(40):
        clock.seconds += draw.choice((0, 1, 60, 200)) - draw.choice((0, 0, 0, 150))
        identity = Identity(user=f"user:{draw.randrange(14)}")
        made_now.forget()
        assert answer(loader, identity) == answer(made_now, identity)
