"""Say which meters the cost of a request may name.

A view can take the names of its meters from its clients. Each new name needs memory in this process, counters in Redis
and lines in the ledger, so the number of names is bounded. Known meters are "requests", the meters of rules, and the
meters in the setting METERS. A cost on another meter is refused.

If METERS is not set, the meters of UNITS, of included quantities and of prices are known too. Then a process also
accepts MAX_FURTHER further meters: a view may count something that no rule limits.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterable, Iterator

from ratelimits.conf import conf, shown
from ratelimits.quota.costs import WrongCost
from ratelimits.rules import Snapshot

#: The names of meters that a rule, a plan and a price can have.
SLUG = re.compile("[-a-zA-Z0-9_]+")
#: Maximum number of further meters that a process accepts in its life.
MAX_FURTHER = 32
#: Minimum seconds between two times that the rules are read again because a meter is not known.
_PAUSE = 1.0

_lock = threading.Lock()
#: The further meters of this process.
_further: set[str] = set()
#: The moment before which the rules are not read again, in seconds of the monotonic clock.
_not_before = 0.0


def need_newer_rules(meters: Iterable[str], snapshot: Snapshot) -> bool:
    """Return whether `check` would refuse a meter, and the caller must first read the rules again.

    A refused request does not ask Redis, so Redis cannot say that the rules in memory are too old. Return True at most
    once in a second.
    """
    global _not_before
    if _refused(list(_unknown(meters, snapshot)), snapshot) is None or time.monotonic() < _not_before:
        return False
    _not_before = time.monotonic() + _PAUSE
    return True


def check(meters: Iterable[str], snapshot: Snapshot | None) -> None:
    """Raise WrongCost if a request names a meter that is not known, and that is not accepted as a further one.

    A meter that no rule and no price can name is never accepted: its usage could neither be limited nor be billed.
    `snapshot` has the rules in memory. It is None while no rules could be read. Then it is not known which meters rules
    name, so every meter that no setting names is a further one.
    """
    global _further
    unknown = list(_unknown(meters, snapshot))
    if not unknown:
        return
    for meter in unknown:
        if not SLUG.fullmatch(meter):
            raise WrongCost(
                f"a meter has only letters from a to z, digits, '-' and '_', so that rules and prices can name it:"
                f" {shown(meter)} is wrong"
            )
    with _lock:
        refused = _refused(unknown, snapshot)
        if refused is None:
            _further = {*_unknown(_further, snapshot), *unknown}
    if refused is None:
        return
    if conf.METERS is not None and snapshot is not None:
        raise WrongCost(
            f"the meter {shown(refused)} is not known: add it to RATELIMITS['METERS'], or make a rule for it"
        )
    raise WrongCost(
        f"the meter {shown(refused)} is not known, and this process has already accepted {MAX_FURTHER} other meters"
        " that no rule and no plan names: list the meters of the project in RATELIMITS['METERS']"
    )


def _unknown(meters: Iterable[str], snapshot: Snapshot | None) -> Iterator[str]:
    """Yield the meters that neither a setting nor a row names."""
    for meter in meters:
        if meter == "requests" or (snapshot is not None and meter in snapshot.rule_meters):
            continue
        declared = conf.METERS
        if declared is not None and meter in declared:
            continue
        if declared is None and (meter in conf.UNITS or (snapshot is not None and meter in snapshot.rows.plan_meters)):
            continue
        yield meter


def _refused(unknown: list[str], snapshot: Snapshot | None) -> str | None:
    """Return a meter that cannot be accepted as a further one; None if all can be accepted."""
    if not unknown:
        return None
    if conf.METERS is not None and snapshot is not None:
        return unknown[0]
    new = [meter for meter in unknown if meter not in _further]
    # A setting, a rule or a plan perhaps names some of the further meters by now.
    if new and len(_further) + len(new) > MAX_FURTHER and len({*_unknown(_further, snapshot), *new}) > MAX_FURTHER:
        return new[0]
    return None


def forget() -> None:
    """Forget the further meters. A test calls this."""
    global _further, _not_before
    _further = set()
    _not_before = 0.0


def _forked() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)
