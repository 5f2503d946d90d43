"""Test that nobody inherits or sees what was another's, whatever texts customers have had."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from django.test import Client

from ratelimits import rules
from ratelimits.engine.keys import BIN_SECONDS
from ratelimits.identity import Identity
from ratelimits.models import ConfigVersion, Customer, KeyReset, Name
from ratelimits.models.customers import make_missing
from ratelimits.quota.checking import check
from ratelimits.quota.standings import live_limits
from ratelimits.status import operating
from ratelimits.usage.customers.move import move
from ratelimits.usage.customers.planning import next_quarter
from tests.support.customers import present
from tests.support.entry_points import begin_afresh
from tests.support.raw import RawRedis
from tests.support.rows import rule
from tests.support.usage.traffic import at, flow, use

pytestmark = pytest.mark.django_db(transaction=True)

SECOND = 10**6
ACME = Identity("user:1", None, "account:acme")


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": lambda request: "acme", "DENY_CACHE_SECONDS": 0}
    begin_afresh(monkeypatch)


def customer(text: str) -> Customer:
    make_missing("default", [text])
    return present("default", [text])[text]


def admitted(who: Identity = ACME, tries: int = 5) -> int:
    return sum(check(who).allowed for _number in range(tries))


@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_log", "concurrency"])
def test_a_new_customer_begins_with_all_permits_and_the_former_one_goes_on_where_it_was(algorithm: str) -> None:
    rule(
        "limit", algorithm, capacity=3, key_kind="account", **({} if algorithm == "concurrency" else {"period": 86_400})
    )
    first = customer("acme")
    assert admitted() == 3
    second = move("acme").customer
    assert admitted() == 3
    move("acme", second)  # what is tried again gives no permit twice
    assert admitted() == 0
    move("acme", first)
    assert admitted() == 0
    move("acme", second)
    assert admitted() == 0
    move("acme")
    assert admitted() == 3


def test_a_text_that_is_given_back_from_the_beginning_has_the_counts_of_nobody_else() -> None:
    rule("limit", "fixed_window", capacity=3, period=86_400, key_kind="account")
    first = customer("acme")
    assert admitted() == 3
    move("acme", None, 0)
    assert admitted() == 3
    assert list(Name.objects.values_list("since", flat=True)) == [0]
    move("acme", first, 0)
    assert admitted() == 3
    assert admitted() == 0


def test_limits_of_users_and_of_other_accounts_go_on() -> None:
    rule("own", "fixed_window", capacity=3, period=86_400, key_kind="user")
    rule("others", "fixed_window", capacity=3, period=86_400, key_kind="account", scope="others")
    bolt = Identity("user:2", None, "account:bolt")
    assert check(bolt, scope="others").allowed
    assert admitted() == 3
    move("acme")
    assert admitted() == 0
    assert [check(bolt, scope="others").allowed for _number in range(3)] == [True, True, False]


def test_people_see_and_reset_the_limit_of_the_present_customer_under_the_account_s_key() -> None:
    rule("limit", "fixed_window", capacity=3, period=86_400, key_kind="account")
    assert admitted() == 3
    move("acme")
    (limit,), error = live_limits(ACME)
    assert error is None
    assert limit.standing is not None
    assert (limit.key, limit.standing.remaining) == ("account:acme", 3)
    assert admitted() == 3
    operating.reset("account:acme", "limit", "asked for it")
    assert KeyReset.objects.get().key == "account:acme"
    assert admitted() == 3


def test_a_limit_that_outlives_redis_goes_on_with_the_usage_of_its_customer_alone(redis_client: RawRedis) -> None:
    rule("monthly", "calendar_window", capacity=5, key_kind="account")
    assert admitted(tries=4) == 4
    flow()
    move("acme", None, next_quarter("default") - BIN_SECONDS)  # from before the usage of this test
    assert admitted(tries=1) == 1
    flow()
    quarter = next_quarter("default")
    move("acme", None, quarter)
    redis_client.flushall()
    rules.forget()
    assert admitted() == 5  # the usage of this quarter is another customer's


def usage(client: Client, **parameters: Any) -> dict[str, Any]:
    response = client.get("/usage/", {"from": "2026-11-01", "to": "2026-11-02", "window": "15m", **parameters})
    assert response.status_code == 200, response.content
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("seed", range(3))
def test_after_any_moves_each_customer_sees_its_own_usage_and_no_other(seed: int, admin_client: Client) -> None:
    # Staff who name an account see what its customer sees.
    chance, texts = random.Random(seed), ["acme", "bolt", "cord"]
    bins = range(at("2026-11-01T00:00") // SECOND, at("2026-11-01T04:00") // SECOND, BIN_SECONDS)
    first = {text: customer(text).pk for text in texts}
    moves: list[tuple[str, int, int | None]] = []
    uses: list[tuple[str, int, int]] = []
    for number in range(40):
        text, bin_ = chance.choice(texts), chance.choice(bins)
        if chance.random() < 0.3:
            made = move(text, chance.choice([None, *Customer.objects.all()]), bin_)
            moves.append((text, bin_, made.customer.pk))
            continue
        version = ConfigVersion.read("default")[0]
        use(text, f"api_key:{number}", cost=number + 1, now=bin_ * SECOND, configuration=version)
        uses.append((text, bin_, number + 1))
    flow()

    def owner(text: str, bin_: float) -> int | None:
        made = (to for moved, since, to in reversed(moves) if moved == text and since <= bin_)
        return next(made, first[text])

    for text in texts:
        now = owner(text, float("inf"))
        own: Counter[str] = Counter()
        for used, bin_, units in uses:
            if owner(used, bin_) == now:
                own[used] += units
        answer = usage(admin_client, account=text)
        seen: Counter[str] = Counter()
        for row in answer["results"]:
            seen[row["account"]] += row["admitted_units"]
        assert seen == own
        by_period: Counter[str] = Counter()
        for row in usage(admin_client, account=text, window="period")["results"]:
            by_period[row["account"]] += row["admitted_units"]
        assert by_period == own
