"""Test names of accounts and keys that no database can store: they must not affect anything else."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import RequestFactory

from ratelimits.billing.reports.rows import report_id
from ratelimits.engine.keys import ledger_name
from ratelimits.identity import identify, name_of
from ratelimits.usage.counting.process_totals import TotalKey
from ratelimits.usage.ledger import process_totals
from ratelimits.usage.ledger.apply import BatchOutcome, quarantine
from ratelimits.usage.ledger.drain import drain
from ratelimits.usage.ledger.resolve import accept
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.ledger.verify.ledger import verify_ledger
from ratelimits.usage.models import DurabilityGap, Line, ProcessTotal, QuarantinedBatch, ShardState
from tests.support.customers import present
from tests.support.raw import RawRedis
from tests.support.usage.traffic import NOON, flow, use
from tests.usage.ledger.test_gaps import keys

pytestmark = pytest.mark.django_db(transaction=True)

LONG = "x" * 300
NAMES = [LONG, "会" * 300, "user:" + "y" * 600, "a\0b", "half \ud800", "~anonymous"]


def ledger() -> dict[str, int]:
    """Return the admitted requests by account."""
    return dict(Line.objects.order_by("account").values_list("account", "admitted_requests"))


def sealed_with(client: RawRedis, name: str, now: str) -> bytes:
    """Seal a batch, replace `name` in a field by another name, as an older version wrote it; return the batch's key."""
    seal()
    (batch,) = (key for key in keys(client, "b:*"))
    fields: dict[bytes, bytes] = client.hgetall(batch)
    for field, value in fields.items():
        if f"|{name}|".encode() in field:
            client.hdel(batch, field)
            client.hset(batch, field.replace(f"|{name}|".encode(), f"|{now}|".encode()), value)
    return batch


@pytest.mark.parametrize("name", [name for name in NAMES if "\ud800" not in name])
def test_any_name_comes_into_the_ledger_with_its_neighbours(name: str, redis_client: RawRedis) -> None:
    use(account=ledger_name(name), key=name)
    use(account=ledger_name(name), key="api_key:1")
    flow()
    assert not QuarantinedBatch.objects.exists()
    assert set(Line.objects.values_list("account", "key")) == {
        (ledger_name(name), ledger_name(name)), (ledger_name(name), "api_key:1"),
    }  # fmt: skip


@pytest.mark.parametrize("name", [LONG, "~anonymous"])
def test_a_batch_that_holds_a_name_of_another_version_drains(name: str, redis_client: RawRedis) -> None:
    use(account="short", key="api_key:1")
    use(account="short", key="api_key:2")
    use(account="short", key="api_key:2")
    sealed_with(redis_client, "short|api_key:2", f"{name}|api_key:2")
    assert drain().outcomes == {BatchOutcome.APPLIED: 1}
    assert ledger() == {"short": 1, ledger_name(name): 2}
    assert not DurabilityGap.objects.exists()
    assert list(verify_ledger("default")) == []


def test_a_batch_that_an_older_version_put_aside_for_a_name_can_be_accepted(redis_client: RawRedis) -> None:
    use(account="short")
    batch = sealed_with(redis_client, "short", LONG)
    fields = {name.decode(): value.decode() for name, value in redis_client.hgetall(batch).items()}
    shard, name = batch.decode().split("{")[1].split("}:b:")
    redis_client.delete(batch, *keys(redis_client, "sealed"))
    state, _new = ShardState.objects.get_or_create(shard=int(shard))
    quarantine("default", state, None, "a name is longer than 255 characters", name=name, fields=fields)
    state.save()
    assert accept("default", QuarantinedBatch.objects.get().pk, "me").startswith("accepted by me: 1 lines, 2 ")
    assert ledger() == {ledger_name(LONG): 1}
    assert list(verify_ledger("default")) == []


@pytest.mark.parametrize("bad", ["half \ud800", "x" * 300 + "\ud800"])
def test_a_total_that_the_database_refuses_does_not_hold_up_the_others(
    bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    start = NOON // 10**6
    of = {account: TotalKey("unmetered", account, "k", "requests", start) for account in ("a", bad, "b", "c")}
    process_totals.write("p1", dict.fromkeys(of.values(), (2, 3)))
    assert sorted(ProcessTotal.objects.values_list("account", "units")) == [("a", 3), ("b", 3), ("c", 3)]
    assert sorted(DurabilityGap.objects.values_list("account", flat=True)) == ["a", "b", "c"]
    assert "The database refuses a total" in caplog.text


@pytest.mark.parametrize("name", NAMES)
def test_a_request_has_the_name_that_the_ledger_has(name: str, settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": lambda request: name}
    who = identify(RequestFactory().get("/"))
    assert who.account_id == ledger_name(str(name_of(name)))
    assert who.account is not None
    who.account.encode()


@pytest.mark.parametrize("name", [*NAMES, "", "acme", "ä" * 255, "user:7", "x" * 255, "~x"])
def test_a_ledger_name_is_short_kept_by_databases_and_its_own(name: str) -> None:
    found = ledger_name(name)
    assert ledger_name(found) == found
    assert len(found) <= 255
    assert "\0" not in found
    found.encode()
    assert (found == name) == (name not in NAMES)


def test_two_names_that_begin_alike_stay_two() -> None:
    assert ledger_name(LONG + "1") != ledger_name(LONG + "2")
    assert ledger_name("user:" + LONG).startswith("user:~")


def test_no_account_has_the_report_of_anonymous_usage() -> None:
    use(account="", key="anonymous")
    use(account="~anonymous")
    flow()
    accounts = set(Line.objects.values_list("account", flat=True))
    assert len(accounts) == 2
    customers = present("default", accounts)
    assert len({report_id(customer.token, 0) for customer in customers.values()}) == 2
