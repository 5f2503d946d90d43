"""Erase a customer from Redis and from the database, for the command `ratelimits_erase` and for the admin."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from ratelimits.embedded import ServerStartError
from ratelimits.engine.transport.refused import cause
from ratelimits.models import Customer
from ratelimits.quota.spending import send_and_give_back
from ratelimits.usage.erasure.counters import LimitKeys
from ratelimits.usage.erasure.erase import Erasure, erase
from ratelimits.usage.ledger.drain import drain
from ratelimits.usage.ledger.fence import NotFencedError
from ratelimits.usage.ledger.retention.erase import NotErasedError
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.ledger.tally import tally

logger = logging.getLogger(__name__)


#: The errors that are raised if Redis cannot be asked.
_UNAVAILABLE = (RedisError, ServerStartError)


@dataclass(frozen=True, slots=True)
class ErasedEverywhere:
    """What was erased in the database; how many Redis keys were deleted, or why some perhaps are not."""

    erasure: Erasure
    keys: int = 0
    error: str = ""


def erase_everywhere(
    customer: Customer, archives: Sequence[Path] = (), *, by: Any = None, why: str = ""
) -> ErasedEverywhere:
    """Bring all usage to the ledger, delete the customer's limits in Redis, and erase the customer.

    The history and the admin's log say that the user `by` did this, and `why`, without the customer's names.

    Raise NotErasedError if Redis cannot be asked, and the errors of `erase`.
    """
    try:
        # Usage that is in Redis still has the names, and would bring them to the ledger after the erasure. So would
        # requests of this process that have spent prefetched permits.
        send_and_give_back(everything=True)
        seal()
        drain()
        tally(wait=True)
        limits = LimitKeys(customer)
        keys = limits.delete()
    except (*_UNAVAILABLE, NotFencedError) as error:
        reason = str(error) if isinstance(error, NotFencedError) else cause(error)
        raise NotErasedError(f"Redis may have usage with the customer's names. {reason}") from error
    done, error_of_redis = erase(customer, archives, by=by, why=why), ""
    try:
        # Requests have counted meanwhile, and lasting limits were perhaps restored from the ledger.
        keys += limits.delete()
    except _UNAVAILABLE as error:
        error_of_redis = cause(error)
    logger.info("customer %s was erased%s", customer, f": {done.why}" if done.why else "")
    return ErasedEverywhere(done, keys, error_of_redis)
