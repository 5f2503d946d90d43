"""Functions for views: refund an admitted request, or settle it. To settle a request is to charge its true cost.

The functions use the answer that an entry point has set as `request.quota`. A request can be refunded or settled only
once. The functions return the new decision. They return None if the request was not admitted, or if Redis did not
decide it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratelimits.engine import Decision, Receipt, arefund, asettle
from ratelimits.engine import refund as _refund
from ratelimits.engine import settle as _settle
from ratelimits.quota import finishing


def receipt_of(request: Any) -> Receipt | None:
    """Return the receipt of a request (Django's or DRF's); None if the request has no receipt."""
    answer = getattr(request, "quota", None)
    return answer.decision.receipt if answer is not None and answer.decision is not None else None


def true_costs(receipt: Receipt, costs: Mapping[str, int]) -> tuple[int, ...]:
    """Return the true cost in each meter of the receipt. For a meter that `costs` does not name, use the charged cost.

    Raise ValueError for a meter in which the request was not charged.
    """
    meters = [meter.name for meter in receipt.usage.meters] if receipt.usage is not None else []
    unknown = set(costs) - set(meters)
    if unknown:
        raise ValueError(f"this request was not charged in {', '.join(sorted(unknown))}, only in {', '.join(meters)}")
    return tuple(costs.get(name, charged) for name, charged in zip(meters, receipt.costs, strict=True))


def settle(request: Any, costs: Mapping[str, int]) -> Decision | None:
    """Charge the true cost of a request in each meter, even above a limit: `settle(request, {"tokens": 312})`.

    A settled request is not refunded when its response is a server error. Raise AlreadySettled if it was settled or
    refunded before, and engine.Unavailable if Redis cannot be asked.
    """
    receipt = receipt_of(request)
    if receipt is None:
        return None
    settled_costs = true_costs(receipt, costs)
    decision = _settle(receipt, settled_costs)
    _note_refund(request, receipt, settled_costs)
    return decision


async def async_settle(request: Any, costs: Mapping[str, int]) -> Decision | None:
    """Do the same as `settle`, in async code."""
    receipt = receipt_of(request)
    if receipt is None:
        return None
    settled_costs = true_costs(receipt, costs)
    decision = await asettle(receipt, settled_costs)
    _note_refund(request, receipt, settled_costs)
    return decision


def refund(request: Any) -> Decision | None:
    """Give back the whole charge of a request. Raise the errors of `settle`."""
    receipt = receipt_of(request)
    if receipt is None:
        return None
    decision = _refund(receipt)
    _note_refund(request, receipt)
    return decision


async def async_refund(request: Any) -> Decision | None:
    """Do the same as `refund`, in async code."""
    receipt = receipt_of(request)
    if receipt is None:
        return None
    decision = await arefund(receipt)
    _note_refund(request, receipt)
    return decision


def _note_refund(request: Any, receipt: Receipt, settled_costs: tuple[int, ...] = ()) -> None:
    """Remember that a request was refunded or settled at a cost of 0, so that it is not refunded again at its end."""
    if not any(settled_costs):
        finishing.note_refund(request, receipt)
