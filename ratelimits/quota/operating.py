"""What people do to one key: see where its limits stand, reset one, and record who did it."""

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

#: How far back the ledger is searched for the account of a key, in seconds, and how many accounts are named.
_SEEN_WITHIN, _MAX_NAMED = 2 * 86_400, 5
#: Stands for the account of a key that has none.
NO_ACCOUNT = "-"


class NotOperatedError(Exception):
    """Nothing was done; the message says why, and what to do instead."""


def identity_of(key: str, account: str = "") -> Identity:
    """Return the identity of a key, with its account: the given one, or else the only one in its latest usage.

    The account NO_ACCOUNT stands for none. Raise ValidationError if the text is not a key, and NotOperatedError if the
    account of a user or API key is not known: under another account nothing would be found of the key.
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
            "The account of %(key)s is not known: it has no usage of the last days. Name the account, or %(none)s."
        )
        raise NotOperatedError(text % {"key": key, "none": _("%s if it has none") % NO_ACCOUNT})
    if len(accounts) > 1:
        text = _("%(key)s was used by several accounts (%(accounts)s): name the one that you mean.")
        raise NotOperatedError(text % {"key": key, "accounts": ", ".join(accounts)})
    return accounts[0]


def _rules_named(name: str = "") -> Choice:
    """Choose the rules of this name, or all rules, in every scope."""

    def choose(snapshot: Snapshot, identity: Identity) -> Iterable[Selection]:
        rows = [row for row in snapshot.rows.rules.values() if name in ("", row.name)]
        asked = {(row.scope, min(row.methods, default="")) for row in rows}
        for scope, method in sorted(asked):
            selection = snapshot.select(scope, method, identity)
            yield replace(selection, rules=tuple(rule for rule in selection.rules if name in ("", rule.name)))

    return choose


def limits_of(identity: Identity) -> list[tuple[AppliedRule, str, Standing]]:
    """Return every rule that limits an identity, the key that it counts, and what is left. Raise UNAVAILABLE."""
    rules.reload()
    return sorted(standings(identity, _rules_named()), key=lambda one: one[0].name)


def counted_under(key: str, rule: str, account: str = "") -> list[tuple[AppliedRule, str, Standing]]:
    """Return the rules of a name that count exactly this key, and what is left.

    Raise as `identity_of` does, NotOperatedError if there is no such rule, and UNAVAILABLE.
    """
    # The server says nothing of newer rules if none of the known ones concerns the key.
    rules.reload()
    rules_of_name = standings(identity_of(key, account), _rules_named(rule))
    counted = [one for one in rules_of_name if one[1] == key]
    if not counted:
        text = _("No rule “%(rule)s” counts %(key)s: its permits cannot be reset.")
        raise NotOperatedError(text % {"rule": rule, "key": key})
    return counted


def reset(key: str, rule: str, reason: str, *, account: str = "", by: Any = None) -> KeyReset:
    """Delete what a key has used under a rule, as if never used, and record it. Usage stays counted.

    A process that repeats a refusal from memory does so for at most DENY_CACHE_SECONDS. Raise ValidationError for a
    key or reason that makes no sense, NotOperatedError if the rule does not count the key, and UNAVAILABLE.
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
        # First, so that nothing is reset without a record; if the server cannot be asked, there is no record either.
        row.save(using=conf.DATABASE)
        uncounted(identity, choose, Op.RESET)
    return row
