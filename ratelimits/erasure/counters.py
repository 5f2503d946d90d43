"""Deleting what Redis has counted for a customer's limits."""

from __future__ import annotations

from collections.abc import Iterator

from ratelimits.conf import conf
from ratelimits.engine.call import Op
from ratelimits.erasure.about import About
from ratelimits.identity import Identity
from ratelimits.models import Customer
from ratelimits.quota.standings import UNAVAILABLE, run_uncounted
from ratelimits.rules import AppliedRule, Selection, Snapshot
from ratelimits.rules.selection import key_of, plain_key

__all__ = ["UNAVAILABLE", "delete_counters"]


def delete_counters(customer: Customer) -> int:
    """Delete the states of the limits of a customer's accounts, users and API keys. Return of how many keys.

    Call this before the erasure: it needs the names. Other states expire by themselves. Raise one of the errors
    UNAVAILABLE.
    """
    about, count = About(conf.DATABASE, customer), 0
    own = about.own_keys(set(about.keys))
    for text in about.texts_now:
        account = f"account:{text}"
        users = [Identity(user=key, account=account) for key in sorted(own) if key.startswith("user:")]
        keys = [Identity(api_key=key, account=account) for key in sorted(own) if key.startswith("api_key:")]
        for identity in (Identity(account=account), *users, *keys):
            run_uncounted(identity, _choose_own, Op.RESET)
            count += 1
    return count


def _choose_own(snapshot: Snapshot, identity: Identity) -> Iterator[Selection]:
    """Yield the rules that count the keys of this identity, and not an address, a group or everybody."""
    own = {identity.account, identity.user, identity.api_key}
    found = (applied.rule for applied in snapshot.in_any_scope(identity))
    applied = (rule for rule in found if isinstance(rule, AppliedRule))
    chosen = tuple(rule for rule in applied if plain_key(key_of(identity, rule.key_kind)) in own)
    yield Selection(chosen, snapshot.version if snapshot.versioned else None)
