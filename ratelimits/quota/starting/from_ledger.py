"""Let a key start with the usage that the ledger has of the current period.

This happens before a process decides the key's first request in a period. Redis is asked whether the rule has counted
the key in this period. If not, the ledger is read, and its usage is charged under a receipt. The name of this receipt
depends only on the rule, the key and the period, and Redis accepts each receipt only once. So the usage is charged
once, even if many processes do this at the same time, and even after a reset.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from ratelimits import rules
from ratelimits.algorithms.parsing import MICROSECONDS
from ratelimits.engine import AlreadySettled, Decision, Mode, NotSent, Receipt, Unanswered
from ratelimits.engine.call import Call, Op
from ratelimits.engine.clock import clock
from ratelimits.engine.decide import adecide_call, decide_call, receipt_call
from ratelimits.engine.program import program
from ratelimits.engine.server import current_server
from ratelimits.identity import Identity
from ratelimits.quota.prepared import Prepared
from ratelimits.rules import Snapshot
from ratelimits.rules.ledger import LedgerUsage
from ratelimits.rules.selection import key_of

#: Maximum number of starts that a process remembers. When this number is reached, all are forgotten, and Redis is asked
#: again.
MAX_STARTED = 100_000
#: The time (s) for which Redis remembers a start after the end of its period.
_MARGIN = 3600

#: The starts that were made: rule, key, and start of the period.
_started: set[tuple[str, str, int]] = set()


class _Start(NamedTuple):
    """A rule, and a key that the rule may not have counted yet. `usage` is what the ledger is asked for."""

    name: str
    key: str
    call: Call
    usage: LedgerUsage

    def charge(self, asked: Decision, units: int) -> Call:
        """Return the call that charges the units, even above the limit. It does so only once."""
        text = f"{self.name}\0{self.key}\0{self.usage.start}"
        nonce = f"start-{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}"
        call = self.call
        receipt = Receipt(nonce, call.program, call.keys, (0,), call.account, None, asked.at, 0, 0)
        seconds = (self.usage.end - asked.at) // MICROSECONDS + _MARGIN
        return receipt_call(receipt, (units,), seconds)


def start(prepared: Prepared, identity: Identity, snapshot: Snapshot) -> None:
    """Let each rule that starts from the ledger do so for this identity.

    Raise RulesUnavailable if the ledger cannot be read, and NotSent or Unavailable if Redis cannot be asked.
    """
    for key_start in _starts(prepared, identity, snapshot):
        try:
            asked = decide_call(current_server(), key_start.call)
            units = 0 if _is_counted(asked) else rules.used(key_start.usage)
            if units:
                decide_call(current_server(), key_start.charge(asked, units))
        except AlreadySettled:
            pass
        except Unanswered as error:
            # The request itself was not sent yet, so it cannot have been counted.
            raise NotSent(str(error), error.event) from error
        _note(key_start)


async def astart(prepared: Prepared, identity: Identity, snapshot: Snapshot) -> None:
    """Do the same as `start`, in async code."""
    for key_start in _starts(prepared, identity, snapshot):
        try:
            asked = await adecide_call(current_server(), key_start.call)
            units = 0 if _is_counted(asked) else await rules.aused(key_start.usage)
            if units:
                await adecide_call(current_server(), key_start.charge(asked, units))
        except AlreadySettled:
            pass
        except Unanswered as error:
            raise NotSent(str(error), error.event) from error
        _note(key_start)


def forget() -> None:
    """Forget all starts. Redis still remembers them."""
    _started.clear()


def _is_counted(asked: Decision) -> bool:
    return asked.standings[0].reset_after > 0


def _note(key_start: _Start) -> None:
    if len(_started) >= MAX_STARTED:
        _started.clear()
    _started.add((key_start.name, key_start.key, key_start.usage.start))


def _starts(prepared: Prepared, identity: Identity, snapshot: Snapshot) -> Iterator[_Start]:
    """Yield a start for each rule that this process has not started yet for this identity in the current period."""
    if identity.account is None:
        return  # The ledger knows usage by account.
    for rule, term in zip(prepared.rules, prepared.program.terms, strict=True):
        if not rule.start_from_ledger or rule.algorithm.admits_nothing:
            continue
        if rule.key_kind not in ("user", "api_key", "account"):
            continue
        span, key = rule.algorithm.valid_span(clock.now()), key_of(identity, rule.key_kind)
        if span is None or (rule.name, key, span[0]) in _started:
            continue
        alone = program((replace(term, key=0, slot=0, mode=Mode.ENFORCE),))
        call = Call(alone, (key,), (1,), identity.account_id, version=None, op=Op.PEEK, at_once=True)
        in_ledger = "" if rule.key_kind == "account" else key
        periods = snapshot.billing(identity.account).boundaries[:2]
        yield _Start(rule.name, key, call, LedgerUsage(identity.account_id, in_ledger, rule.meter, periods, *span))
