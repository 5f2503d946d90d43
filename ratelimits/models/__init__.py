"""The app's models. `Inspect`, `Shadow` and `Status` have no table: each of them stands for a page of the admin."""

from __future__ import annotations

import ratelimits.models.installed  # noqa: F401  (raises an error if the app is not installed)
from ratelimits.models.access.resets import KeyReset
from ratelimits.models.access.rows import Access
from ratelimits.models.accounts import Account, Plan, PlanInclusion, PlanMembership
from ratelimits.models.adjustments import Adjustment
from ratelimits.models.alerts import Alert, AlertChannel, AlertDelivery, AlertState
from ratelimits.models.customers import Customer, Move, Name
from ratelimits.models.keys import KeyKind
from ratelimits.models.ledger import ArchivedRange, Batch, ChainMark, Line, QuarantinedBatch, Shadow, ShardState
from ratelimits.models.ledger.erased import ErasedDigest
from ratelimits.models.ledger.gaps import DurabilityGap, GapChange, GapKind, ProcessTotal
from ratelimits.models.overrides import KeyOverride
from ratelimits.models.periods import FrozenPeriod
from ratelimits.models.prices import PlanPrice
from ratelimits.models.push import PushDelivery, PushedReport, PushReceiver
from ratelimits.models.reports import Report, ReportLine
from ratelimits.models.row_files.uploads import Upload
from ratelimits.models.rules import Rule
from ratelimits.models.status.recorded import RecordedRequest
from ratelimits.models.status.task_runs import TaskRun
from ratelimits.models.status.totals import KeyTotal, PeriodUsage, RuleTotal
from ratelimits.models.versions import Change, ConfigVersion, Inspect, Status, Tombstone

__all__ = [
    "Access",
    "Account",
    "Adjustment",
    "Alert",
    "AlertChannel",
    "AlertDelivery",
    "AlertState",
    "ArchivedRange",
    "Batch",
    "ChainMark",
    "Change",
    "ConfigVersion",
    "Customer",
    "DurabilityGap",
    "ErasedDigest",
    "FrozenPeriod",
    "GapChange",
    "GapKind",
    "Inspect",
    "KeyKind",
    "KeyOverride",
    "KeyReset",
    "KeyTotal",
    "Line",
    "Move",
    "Name",
    "PeriodUsage",
    "Plan",
    "PlanInclusion",
    "PlanMembership",
    "PlanPrice",
    "ProcessTotal",
    "PushDelivery",
    "PushReceiver",
    "PushedReport",
    "QuarantinedBatch",
    "RecordedRequest",
    "Report",
    "ReportLine",
    "Rule",
    "RuleTotal",
    "Shadow",
    "ShardState",
    "Status",
    "TaskRun",
    "Tombstone",
    "Upload",
]
