"""What can still happen to a request that was admitted: refunded, settled at what it truly used, its leases ended.

Each acts on the answer that a face left as `request.quota`, and at most once; a request that was not admitted, or that
no server decided, has nothing to give back, and they say so with None.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from redis.exceptions import ResponseError

from ratelimits.conf import conf
from ratelimits.engine import (
    AlreadySettled,
    Decision,
    Receipt,
    Unavailable,
    arefund,
    arelease,
    asettle,
)
from ratelimits.engine import refund as _refund
from ratelimits.engine import release as _release
from ratelimits.engine import settle as _settle
from ratelimits.engine.allotment import Taken
from ratelimits.engine.limits import Concurrency

logger = logging.getLogger(__name__)


def receipt_of(request: Any) -> Receipt | None:
    """The receipt of an admitted request; Django's request or DRF's."""
    answer = getattr(request, "quota", None)
    return answer.decision.receipt if answer is not None and answer.decision is not None else None


def _to_settle(request: Any) -> Receipt | None:
    """The receipt of a request that somebody wants to settle or refund: he should know when there cannot be one."""
    receipt, answer = receipt_of(request), getattr(request, "quota", None)
    if receipt is None and answer is not None and answer.allowed and isinstance(answer.decision, Taken):
        logger.warning("A request of permits taken ahead cannot be settled or refunded: give its rule no allotment")
    return receipt


def true_costs(receipt: Receipt, costs: Mapping[str, int]) -> tuple[int, ...]:
    """Costs by slot: those given by meter, for the other meters what was charged; ValueError for an unknown one."""
    meters = [meter.name for meter in receipt.usage.meters] if receipt.usage is not None else []
    unknown = set(costs) - set(meters)
    if unknown:
        raise ValueError(f"this request was not charged in {', '.join(sorted(unknown))}, only in {', '.join(meters)}")
    return tuple(costs.get(name, charged) for name, charged in zip(meters, receipt.costs, strict=True))


def settle(request: Any, costs: Mapping[str, int]) -> Decision | None:
    """Charge what the request truly used, by meter, even over the limit: `settle(request, {"tokens": 312})`.

    Raises AlreadySettled the second time, and engine.Unavailable when the server cannot be asked.
    """
    receipt = _to_settle(request)
    return None if receipt is None else _settle(receipt, true_costs(receipt, costs))


async def async_settle(request: Any, costs: Mapping[str, int]) -> Decision | None:
    """`settle`, awaited."""
    receipt = _to_settle(request)
    return None if receipt is None else await asettle(receipt, true_costs(receipt, costs))


def refund(request: Any) -> Decision | None:
    """Give back all that the request was charged. Raises as `settle` does."""
    receipt = _to_settle(request)
    return None if receipt is None else _refund(receipt)


async def async_refund(request: Any) -> Decision | None:
    """`refund`, awaited."""
    receipt = _to_settle(request)
    return None if receipt is None else await arefund(receipt)


def _leases(receipt: Receipt) -> bool:
    return any(isinstance(term.algorithm, Concurrency) for term in receipt.program.terms)


def _last(receipt: Receipt, status: int) -> list[Callable[[Receipt], Decision]]:
    """What is left to do after a response of that status."""
    refunds = status >= 500 and not conf.BILL_ERRORS
    return [*([_refund] if refunds else []), *([_release] if _leases(receipt) else [])]


_Step = Callable[[Receipt], Decision]
_ASYNC: dict[_Step, Callable[[Receipt], Awaitable[Decision]]] = {_refund: arefund, _release: arelease}


def finish(request: Any, status: int) -> None:
    """After the response: give back what a server error cost (unless BILL_ERRORS), and end the request's leases.

    Never raises: the response is on its way. What could not be done is logged.
    """
    receipt = receipt_of(request)
    if receipt is None:
        return
    for step in _last(receipt, status):
        try:
            step(receipt)
        except AlreadySettled:
            continue
        except (Unavailable, ResponseError) as error:
            logger.error(
                "%s of receipt %s failed after the response: %s", getattr(step, "__name__", step), receipt.nonce, error
            )


async def async_finish(request: Any, status: int) -> None:
    """`finish`, awaited."""
    receipt = receipt_of(request)
    if receipt is None:
        return
    for step in _last(receipt, status):
        try:
            await _ASYNC[step](receipt)
        except AlreadySettled:
            continue
        except (Unavailable, ResponseError) as error:
            logger.error(
                "%s of receipt %s failed after the response: %s", getattr(step, "__name__", step), receipt.nonce, error
            )
