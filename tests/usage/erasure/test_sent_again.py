"""Test batches that Redis sends again after names in them were erased: only their counters can be compared."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from django.db.models import F

from ratelimits.usage.erasure.erase import erase
from ratelimits.usage.ledger.apply import BatchOutcome
from ratelimits.usage.ledger.drain import drain
from ratelimits.usage.ledger.retention import compact as compacting
from ratelimits.usage.ledger.retention.compact import compact
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.ledger.verify.ledger import verify_ledger
from ratelimits.usage.models import DurabilityGap, GapKind, Line, QuarantinedBatch, ShardState
from tests.support.customers import present
from tests.support.usage.traffic import flow, use
from tests.usage.ledger.test_gaps import keys, put_back

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(params=["single", "joined"])
def again(request: pytest.FixtureRequest, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the name and the fields of a batch, which was joined with another or not, and then erased."""
    for _number in range(3):
        use("ada")
    seal()
    (key,) = keys(redis_client, "b:*")
    fields: Any = redis_client.hgetall(key)
    flow()
    if request.param == "joined":
        monkeypatch.setattr(compacting, "SPAN", 10**17)
        use("ada")
        flow()
        ShardState.objects.update(watermark=F("watermark") + 2 * compacting.SPAN)
        assert [done.batches for done in compact()] == [2]
    erase(present("default", ["ada"])["ada"])
    return request.param, key, fields


def test_the_same_batch_is_known(redis_client: redis.Redis, again: Any) -> None:
    _kind, key, fields = again
    put_back(redis_client, key, fields, cum=6, count=3)
    assert drain().outcomes == {BatchOutcome.DONE_BEFORE: 1}
    assert not Line.objects.filter(account="ada").exists()
    assert list(verify_ledger("default")) == []


def test_a_batch_with_more_usage_is_quarantined(redis_client: redis.Redis, again: Any) -> None:
    _kind, key, fields = again
    put_back(redis_client, key, fields, cum=18, count=9)
    assert drain().outcomes == {BatchOutcome.QUARANTINED: 1}
    assert QuarantinedBatch.objects.get().fields[0].startswith("ada\t")


def test_a_batch_with_less_usage_is_declared_where_it_can_be_known(redis_client: redis.Redis, again: Any) -> None:
    kind, key, fields = again
    put_back(redis_client, key, fields, cum=4, count=2)
    outcomes = drain().outcomes
    if kind == "single":
        assert outcomes == {BatchOutcome.DISCARDED: 1}
        assert DurabilityGap.objects.get().kind == GapKind.FORK
    else:
        assert outcomes == {BatchOutcome.DONE_BEFORE: 1}
    assert not Line.objects.filter(account="ada").exists()
