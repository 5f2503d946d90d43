"""Read the rules into a snapshot (a frozen copy in memory), and find the rules that apply to a request.

`current()` returns the snapshot in force. Usually it makes no query. `reload(version)` reads a newer version, after
Redis has answered that the rules of this process are too old.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.core.signals import setting_changed
from django.db.models.signals import post_migrate

from ratelimits.models.versions import raised_above_redis
from ratelimits.rules.access import AccessRow
from ratelimits.rules.keyed import Billing
from ratelimits.rules.loader import Loader
from ratelimits.rules.query_thread import RulesUnavailable
from ratelimits.rules.selection import AppliedRule, ExplainedRule, Selection, UnreadableRule
from ratelimits.rules.snapshot import Snapshot

if TYPE_CHECKING:
    from ratelimits.identity import Identity

__all__ = [
    "AccessRow",
    "AppliedRule",
    "Billing",
    "ExplainedRule",
    "RulesUnavailable",
    "Selection",
    "Snapshot",
    "UnreadableRule",
    "acurrent",
    "aquery",
    "are_replaced",
    "areload",
    "aselect",
    "aselect_exact",
    "current",
    "forget",
    "in_memory",
    "query",
    "read_as",
    "reload",
    "replace_rules",
    "use_clock",
]

_loader = Loader()

current = _loader.current
in_memory = _loader.in_memory
acurrent = _loader.acurrent
reload = _loader.reload
areload = _loader.areload
forget = _loader.forget
replace_rules = _loader.replace_rules
use_clock = _loader.use_clock
are_replaced = _loader.are_replaced
read_as = _loader.read_as
query = _loader.query
aquery = _loader.aquery


async def aselect(snapshot: Snapshot, scope: str, method: str, identity: Identity) -> Selection:
    """Do the same as `snapshot.select`, in async code. First read missing rows about the identity's keys."""
    missing = snapshot.missing(identity)
    if missing:
        snapshot = await _loader.aload(missing)
    return snapshot.select(scope, method, identity)


async def aselect_exact(snapshot: Snapshot, scope: str, identity: Identity) -> Selection:
    """Do the same as `snapshot.select_exact`, in async code. First read missing rows about the identity's keys."""
    missing = snapshot.missing(identity)
    if missing:
        snapshot = await _loader.aload(missing)
    return snapshot.select_exact(scope, identity)


def _forget_after_migrate(using: str, **kwargs: object) -> None:
    """Forget the rules after `migrate`, because it has perhaps changed or emptied the tables."""
    forget()


def _forget_version(**kwargs: object) -> None:
    """Forget the rules after an edit that has raised the database's version above the version in Redis."""
    forget()


def _forget_settings(setting: str, **kwargs: object) -> None:
    if setting in ("RATELIMITS", "DATABASES"):
        forget()


post_migrate.connect(_forget_after_migrate, dispatch_uid="ratelimits.rules.forget")
raised_above_redis.connect(_forget_version, dispatch_uid="ratelimits.rules.raised_above_redis")
setting_changed.connect(_forget_settings, dispatch_uid="ratelimits.rules.settings")
