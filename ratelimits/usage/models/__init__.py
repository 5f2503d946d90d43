"""The tables of the ledger, of totals, and of alerts. `Shadow` has no table: it stands for a page of the admin."""

from __future__ import annotations

import ratelimits.usage.models.installed  # noqa: F401  (raises an error if the app is not installed)
from ratelimits.usage.models.alerts import Alert, AlertChannel, AlertDelivery, AlertState
from ratelimits.usage.models.erased import ErasedDigest
from ratelimits.usage.models.gaps import DurabilityGap, GapChange, GapKind, ProcessTotal
from ratelimits.usage.models.ledger import ArchivedRange, Batch, ChainMark, Line, QuarantinedBatch, Shadow, ShardState
from ratelimits.usage.models.recorded import RecordedRequest
from ratelimits.usage.models.task_runs import TaskRun
from ratelimits.usage.models.totals import KeyTotal, PeriodUsage, RuleTotal

__all__ = [
    "Alert",
    "AlertChannel",
    "AlertDelivery",
    "AlertState",
    "ArchivedRange",
    "Batch",
    "ChainMark",
    "DurabilityGap",
    "ErasedDigest",
    "GapChange",
    "GapKind",
    "KeyTotal",
    "Line",
    "PeriodUsage",
    "ProcessTotal",
    "QuarantinedBatch",
    "RecordedRequest",
    "RuleTotal",
    "Shadow",
    "ShardState",
    "TaskRun",
]
