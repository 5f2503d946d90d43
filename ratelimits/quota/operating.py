"""Show how much one key has left under its limits, and reset a limit of the key.

A reset is recorded with who did it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from django.db import transaction
from django.utils.translation import gettext as _

from ratelimits import rules
from ratelimits.conf import conf
from ratelimits.engine import Standing
from ratelimits.engine.call import Op
from ratelimits.engine.keys import ledger_name
from ratelimits.identity import Identity
from ratelimits.models import KeyReset, Line
from ratelimits.models.keys import validate_key
from ratelimits.quota.standings import Choice, standings, uncounted
from ratelimits.rules import AppliedRule, Selection, Snapshot

#: To find the account of a key, the ledger is searched this many seconds back.
_SEEN_WITHIN = 2 * 86_400
#: Maximum number of accounts that an error names.
_MAX_NAMED = 5
#: Stands for the account of a key that has none.
NO_ACCOUNT = "-"


class NotOperatedError(Exception):
    """Nothing was done. The message says why, and what to do instead."""


def identity_of(key: str, account: str = "") -> Identity:
    """Return the identity of a key, with its account. If no account is given, take the account from the latest usage.

    NO_ACCOUNT means that the key has no account. Raise ValidationError if the text is not a key. Raise NotOperatedError
    if the latest usage of a user or API key does not name exactly one account: the key's limits are stored with the
    account, so they would not be found.
    """
    validate_key(key)
    kind, _colon, name = key.partition(":")
    if kind == "ip":
        return Identity(address=key)
    if kind == "account":
        return Identity(account=f"account:{ledger_name(name)}")
    owner = account or _account_of(key)
    if owner == NO_ACCOUNT:
        owner = ""
    payer = f"account:{ledger_name(owner)}" if owner else None
    return Identity(user=key, account=payer) if kind == "user" else Identity(api_key=key, account=payer)


def _account_of(key: str) -> str:
    """Return the account of a user or API key."""
    kind, _colon, name = key.partition(":")
    if kind == "user" and conf.ACCOUNT is None:
        return name
    lines = Line.objects.using(conf.DATABASE).filter(bin__gte=int(time.time()) - _SEEN_WITHIN, key=ledger_name(key))
    accounts = sorted(lines.exclude(account="").order_by().values_list("account", flat=True).distinct()[:_MAX_NAMED])
    if not accounts:
        text = _(
            "The account of %(key)s is not known: it has no usage in the last days. Name the account, or %(none)s."
        )
        raise NotOperatedError(text % {"key": key, "none": _("%s if it has none") % NO_ACCOUNT})
    if len(accounts) > 1:
        text = _("%(key)s was used by several accounts (%(accounts)s): name the one that you mean.")
        raise NotOperatedError(text % {"key": key, "accounts": ", ".join(accounts)})
    return accounts[0]


def _rules_named(name: str = "") -> Choice:
    """Return a function that chooses the rules with this name in every scope; "" for all rules."""

    def choose(snapshot: Snapshot, identity: Identity) -> Iterable[Selection]:
        rows = [row for row in snapshot.rows.rules.values() if name in ("", row.name)]
        asked = {(row.scope, min(row.methods, default="")) for row in rows}
        for scope, method in sorted(asked):
            selection = snapshot.select(scope, method, identity)
            yield replace(selection, rules=tuple(rule for rule in selection.rules if name in ("", rule.name)))

    return choose


def limits_of(identity: Identity) -> list[tuple[AppliedRule, str, Standing]]:
    """Return every rule that limits an identity, with the key that the rule counts and what is left.

    Raise one of the errors UNAVAILABLE.
    """
    rules.reload()
    return sorted(standings(identity, _rules_named()), key=lambda one: one[0].name)


def counted_under(key: str, rule: str, account: str = "") -> list[tuple[AppliedRule, str, Standing]]:
    """Return the rules with this name that count exactly this key, and what is left.

    Raise the errors of `identity_of`, NotOperatedError if no rule with this name counts the key, or one of UNAVAILABLE.
    """
    # Read the newest rules first: if no known rule applies to the key, the server is not asked and cannot name newer
    # ones.
    rules.reload()
    rules_of_name = standings(identity_of(key, account), _rules_named(rule))
    counted = [one for one in rules_of_name if one[1] == key]
    if not counted:
        text = _("No rule “%(rule)s” counts %(key)s: its permits cannot be reset.")
        raise NotOperatedError(text % {"rule": rule, "key": key})
    return counted


def reset(key: str, rule: str, reason: str, *, account: str = "", by: Any = None) -> KeyReset:
    """Delete the state of a key under a rule, as if the key was never used, and record this. Do not change the usage.

    A process may still repeat an earlier refusal for at most DENY_CACHE_SECONDS. Raise ValidationError for a wrong key
    or reason, NotOperatedError if the rule does not count the key, or one of the errors UNAVAILABLE.
    """
    identity = identity_of(key, account)
    row = KeyReset(key=key, account=identity.owner, rule=rule, reason=reason, by=by)
    row.full_clean(exclude=["by"])
    counted_under(key, rule, account)

    def choose(snapshot: Snapshot, who: Identity) -> Iterable[Selection]:
        for selection in _rules_named(rule)(snapshot, who):
            keys = selection.keys(who)
            own = tuple(one for one, its in zip(selection.rules, keys, strict=True) if its == key)
            yield replace(selection, rules=own)

    with transaction.atomic(using=conf.DATABASE):
        # Save the record first, so that nothing is reset without a record. If the reset fails, the record is rolled
        # back.
        row.save(using=conf.DATABASE)
        uncounted(identity, choose, Op.RESET)
    return row
