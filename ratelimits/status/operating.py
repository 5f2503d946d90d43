"""Show how many permits a key has left under its limits, and reset a limit of the key.

The database stores each reset, with its reason and the user who did it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from ratelimits.models import KeyReset
from ratelimits.models.fields import view_key_texts
from ratelimits.models.keys import address_in, canonical_key, key_name, validate_account, validate_key
from ratelimits.quota.standings import Choice, run_uncounted, standings
from ratelimits.rules import AppliedRule, Selection, Snapshot
from ratelimits.rules.selection import plain_key
from ratelimits.status.keys import accounts_of_key

#: Maximum number of accounts that an error names.
_MAX_NAMED = 5
#: A text that people give instead of an account, if a key has no account. No account has this name (see `naming`).
NO_ACCOUNT = "-"


class NothingDoneError(Exception):
    """Nothing was done. The message says why, and what to do instead."""


class UnknownAccountError(NothingDoneError):
    """The account of a key is not known. If several accounts have used the key lately, `accounts` contains them."""

    def __init__(self, message: str, accounts: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.accounts = accounts


def identity_of(key: str, account: str = "") -> Identity:
    """Return the identity of a key with its account. If `account` is "", take the account from the latest usage.

    If `account` is NO_ACCOUNT, the key has no account. Raise ValidationError if `key` is not a key, or if `account` is
    no name of an account. Raise UnknownAccountError if the latest usage of a user or API key has no account, or has
    several accounts. The limits of a key are stored in the account's shard, so the limits cannot be found without the
    account. A key that a view gives belongs to no account.
    """
    address = address_in(key)
    validate_key(address)
    if view_key_texts.is_text(key):
        return Identity(view_keys=(key_name(key),))
    kind = key.partition(":")[0]
    if kind == "ip":
        return Identity(address=address)
    if kind == "account":
        return Identity(account=key)
    if account not in ("", NO_ACCOUNT):
        validate_account(account)
    owner = account or _account_of(key)
    own = _account_of(key) if kind == "user" and conf.ACCOUNT is None else owner
    if owner != own:
        # The limits of the user are in the shard of the own account. In any other shard they would look unused.
        text = _("The account of %(key)s is %(account)s, and no request has another one: name no account.")
        raise NothingDoneError(text % {"key": key, "account": own})
    payer = f"account:{owner}" if owner != NO_ACCOUNT else None
    return Identity(user=key, account=payer) if kind == "user" else Identity(api_key=key, account=payer)


def _account_of(key: str) -> str:
    """Return the account of a user or API key. Raise UnknownAccountError if it is not known."""
    kind, _colon, name = key.partition(":")
    if kind == "user" and conf.ACCOUNT is None:
        return name  # By default, each user is an account too.
    # One more, because one of them can be "".
    accounts = [account for account in accounts_of_key(ledger_name(key), _MAX_NAMED + 1) if account][:_MAX_NAMED]
    if not accounts:
        text = _(
            "The account of %(key)s is not known: this key has no usage in the last days."
            " Name the account. If the key has no account, write a hyphen (%(none)s)."
        )
        raise UnknownAccountError(text % {"key": key, "none": NO_ACCOUNT})
    if len(accounts) > 1:
        text = _("%(key)s was used by several accounts (%(accounts)s): name the account that you mean.")
        raise UnknownAccountError(text % {"key": key, "accounts": ", ".join(accounts)}, accounts)
    return accounts[0]


def _choose_by_name(name: str) -> Choice:
    """Return a function that chooses the rules with this name in every scope."""

    def choose(snapshot: Snapshot, identity: Identity) -> Iterable[Selection]:
        found = (applied.rule for applied in snapshot.in_any_scope(identity) if applied.row.name == name)
        rules_of_name = tuple(rule for rule in found if isinstance(rule, AppliedRule))
        yield Selection(rules_of_name, snapshot.version if snapshot.versioned else None)

    return choose


def counted_under(key: str, rule: str, account: str = "") -> list[tuple[AppliedRule, str, Standing]]:
    """Return the rules with this name that count exactly this key, each with the key and the standing of the limit.

    Raise the errors of `identity_of`, NothingDoneError if no rule with this name counts the key, or one of the errors
    `standings.UNAVAILABLE`.
    """
    # Read the newest rules first: while Redis does not answer, it cannot report that the rules in memory are too old.
    rules.reload()
    rules_of_name = standings(identity_of(key, account), _choose_by_name(rule))
    counted = [
        (applied, key, standing) for applied, counted_key, standing in rules_of_name if counted_key == key_name(key)
    ]
    if not counted:
        text = _("No rule “%(rule)s” counts %(key)s, so there are no permits of this key to reset.")
        raise NothingDoneError(text % {"rule": rule, "key": key})
    return counted


def reset(key: str, rule: str, reason: str, *, account: str = "", by: Any = None) -> KeyReset:
    """Delete the state of a key under a rule, and save a KeyReset row. The key then has all its permits again.

    The usage does not change. A process can repeat an earlier refusal for up to DENY_CACHE_SECONDS. Raise
    ValidationError for a wrong key or reason, NothingDoneError if the rule does not count the key, or one of the errors
    `standings.UNAVAILABLE`.
    """
    key = canonical_key(key)
    identity = identity_of(key, account)
    row = KeyReset(key=key, account=identity.account_id, rule=rule, reason=reason, by=by)
    row.full_clean(exclude=["by"])
    counted_under(key, rule, account)

    def choose(snapshot: Snapshot, identity: Identity) -> Iterable[Selection]:
        for selection in _choose_by_name(rule)(snapshot, identity):
            keys, name = map(plain_key, selection.keys(identity)), key_name(key)
            rules_of_key = tuple(
                applied for applied, counted_key in zip(selection.rules, keys, strict=True) if counted_key == name
            )
            yield replace(selection, rules=rules_of_key)

    with transaction.atomic(using=conf.DATABASE):
        # Save the row first, so that no reset is without a row. If the reset fails, the transaction removes the row.
        row.save(using=conf.DATABASE)
        run_uncounted(identity, choose, Op.RESET)
    return row
