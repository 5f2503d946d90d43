"""A pytest plugin that puts a batch into quarantine, for tests that resolve it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from ratelimits.models import ConfigVersion
from ratelimits.usage.ledger.apply import BatchOutcome
from ratelimits.usage.ledger.drain import drain
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.models import QuarantinedBatch
from tests.support.usage.traffic import flow, use
from tests.usage.ledger.test_gaps import keys, put_back

Fork = Callable[[int], QuarantinedBatch]


@pytest.fixture
def fork(redis_client: redis.Redis) -> Fork:
    """Put three requests into the ledger. Return a function that lets their batch come again with another number.

    The batch that comes again is put into quarantine.
    """
    for _ in range(3):
        use(configuration=ConfigVersion.read("default")[0])
    seal()
    (key,) = keys(redis_client, "b:*")
    fields: Any = redis_client.hgetall(key)
    flow()

    def come_again(count: int) -> QuarantinedBatch:
        put_back(redis_client, key, fields, cum=2 * count, count=count)
        assert drain().outcomes == {BatchOutcome.QUARANTINED: 1}
        return QuarantinedBatch.objects.latest("pk")

    return come_again
