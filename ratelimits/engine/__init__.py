"""Decide limits in one atomic call of a Lua script in Redis. The engine uses no models, no requests and no DRF."""

from __future__ import annotations

from ratelimits.algorithms.limits import Algorithm, Limit, Mode, algorithm_from_json
from ratelimits.engine.call import ANY, Meter, Receipt, Usage
from ratelimits.engine.decide import (
    adecide,
    apeek,
    arefund,
    arelease,
    areserve,
    areset,
    asettle,
    decide,
    peek,
    refund,
    release,
    reserve,
    reset,
    settle,
)
from ratelimits.engine.decision import AlreadySettled, Decision, Full, Lost, Stale, Standing
from ratelimits.engine.transport.connection import NotSent, Unanswered, Unavailable

__all__ = [
    "ANY",
    "Algorithm",
    "AlreadySettled",
    "Decision",
    "Full",
    "Limit",
    "Lost",
    "Meter",
    "Mode",
    "NotSent",
    "Receipt",
    "Stale",
    "Standing",
    "Unanswered",
    "Unavailable",
    "Usage",
    "adecide",
    "algorithm_from_json",
    "apeek",
    "arefund",
    "arelease",
    "areserve",
    "areset",
    "asettle",
    "decide",
    "peek",
    "refund",
    "release",
    "reserve",
    "reset",
    "settle",
]
