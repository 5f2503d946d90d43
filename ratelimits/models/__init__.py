"""The app's tables."""

from __future__ import annotations

from ratelimits.models.accounts import Account, Plan, PlanInclusion, PlanMembership
from ratelimits.models.keys import KeyKind
from ratelimits.models.ledger import Batch, DurabilityGap, GapKind, Line, QuarantinedBatch, ShardState
from ratelimits.models.overrides import KeyOverride
from ratelimits.models.rules import Rule
from ratelimits.models.versions import ConfigVersion, Tombstone

__all__ = [
    "Account",
    "Batch",
    "ConfigVersion",
    "DurabilityGap",
    "GapKind",
    "KeyKind",
    "KeyOverride",
    "Line",
    "Plan",
    "PlanInclusion",
    "PlanMembership",
    "QuarantinedBatch",
    "Rule",
    "ShardState",
    "Tombstone",
]
