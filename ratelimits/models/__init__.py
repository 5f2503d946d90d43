"""The app's models. `Inspect`, `Shadow` and `Status` have no table: each of them stands for a page of the admin."""

from __future__ import annotations

import ratelimits.models.installed  # noqa: F401  (raises an error if the app is not installed)
from ratelimits.models.access.resets import KeyReset
from ratelimits.models.access.rows import Access
from ratelimits.models.accounts import Account, Plan, PlanInclusion, PlanMembership
from ratelimits.models.customers import Customer, Move, Name
from ratelimits.models.keys import KeyKind
from ratelimits.models.overrides import KeyOverride
from ratelimits.models.periods import FrozenPeriod
from ratelimits.models.row_files.uploads import Upload
from ratelimits.models.rules import Rule
from ratelimits.models.versions import Change, ConfigVersion, Inspect, Status, Tombstone

__all__ = [
    "Access",
    "Account",
    "Change",
    "ConfigVersion",
    "Customer",
    "FrozenPeriod",
    "Inspect",
    "KeyKind",
    "KeyOverride",
    "KeyReset",
    "Move",
    "Name",
    "Plan",
    "PlanInclusion",
    "PlanMembership",
    "Rule",
    "Status",
    "Tombstone",
    "Upload",
]
