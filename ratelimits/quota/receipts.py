"""What a view can do to a request that was admitted: refund it, or settle it at what it truly used.

Each acts on the answer that a face left as `request.quota`, and at most once; a request that was not admitted, or that
no server decided, has nothing to give back, and they say so with None.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ratelimits.engine import Decision, Receipt, arefund, asettle
from ratelimits.engine import refund as _refund
from ratelimits.engine import settle as _settle
from ratelimits.quota import finishing
from ratelimits.quota.prefetch import PrefetchedDecision

logger = logging.getLogger(__name__)


def receipt_of(request: Any) -> Receipt | None:
    """The receipt of an admitted request; Django's request or DRF's."""
    answer = getattr(request, "quota", None)
    return answer.decision.receipt if answer is not None and answer.decision is not None else None


def _to_settle(request: Any) -> Receipt | None:
    """The receipt of a request that somebody wants to settle or refund: he should know when there cannot be one."""
    receipt, answer = receipt_of(request), getattr(request, "quota", None)
    if receipt is None and answer is not None and answer.allowed and isinstance(answer.decision, PrefetchedDecision):
        logger.warning(
            "A request of prefetched permits cannot be settled or refunded: leave its rule's permits per prefetch empty"
        )
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

    What was settled stays so, also when the response is a server error: a receipt acts once. Raises AlreadySettled the
    second time, and engine.Unavailable when the server cannot be asked.
    """
    receipt = _to_settle(request)
    if receipt is None:
        return None
    true = true_costs(receipt, costs)
    decision = _settle(receipt, true)
    _note(request, receipt, true)
    return decision


async def async_settle(request: Any, costs: Mapping[str, int]) -> Decision | None:
    """`settle`, awaited."""
    receipt = _to_settle(request)
    if receipt is None:
        return None
    true = true_costs(receipt, costs)
    decision = await asettle(receipt, true)
    _note(request, receipt, true)
    return decision


def refund(request: Any) -> Decision | None:
    """Give back all that the request was charged. Raises as `settle` does."""
    receipt = _to_settle(request)
    if receipt is None:
        return None
    decision = _refund(receipt)
    _note(request, receipt)
    return decision


async def async_refund(request: Any) -> Decision | None:
    """`refund`, awaited."""
    receipt = _to_settle(request)
    if receipt is None:
        return None
    decision = await arefund(receipt)
    _note(request, receipt)
    return decision


def _note(request: Any, receipt: Receipt, true: tuple[int, ...] = ()) -> None:
    """Leave nothing to be given back at the request's end if it costs nothing any more."""
    if not any(true):
        finishing.refunded(request, receipt)
