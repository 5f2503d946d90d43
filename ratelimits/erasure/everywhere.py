"""Erase a customer from Redis and from the database, for the command `ratelimits_erase` and for the admin."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from redis.exceptions import RedisError

from ratelimits.embedded import ServerStartError
from ratelimits.erasure.counters import UNAVAILABLE, delete_counters
from ratelimits.erasure.erase import Erasure, erase
from ratelimits.models import Customer
from ratelimits.usage.drain import drain
from ratelimits.usage.fence import NotFencedError
from ratelimits.usage.retention.erase import NotErasedError
from ratelimits.usage.seal import seal
from ratelimits.usage.tally import tally

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ErasedEverywhere:
    """What was erased in the database; for how many keys Redis has deleted limits, or why it has not."""

    erasure: Erasure
    keys: int = 0
    error: str = ""


def erase_everywhere(customer: Customer, archives: Sequence[Path] = ()) -> ErasedEverywhere:
    """Bring all usage to the ledger, delete the customer's limits in Redis, and erase the customer.

    Raise NotErasedError if Redis does not answer, and the errors of `erase`.
    """
    try:
        # Usage that is in Redis still has the names, and would bring them to the ledger after the erasure.
        seal()
        drain()
    except (RedisError, ServerStartError, NotFencedError) as error:
        raise NotErasedError(f"Redis may have usage with the customer's names, and does not answer: {error}") from error
    tally(wait=True)
    keys, error_of_redis = 0, ""
    try:
        keys = delete_counters(customer)
    except UNAVAILABLE as error:
        error_of_redis = str(error)
    done = erase(customer, archives)
    logger.info("customer %s was erased", customer)
    return ErasedEverywhere(done, keys, error_of_redis)
