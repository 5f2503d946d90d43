"""Count the keys that a rule applies to, and the keys that are above its limit."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ratelimits import moments, rules
from ratelimits.algorithms.base import MICROSECONDS
from ratelimits.algorithms.limits import Algorithm, Limit
from ratelimits.conf import conf
from ratelimits.engine.decide import peek
from ratelimits.identity import Identity, kinds_in_account, user_of_account
from ratelimits.models import PlanMembership, Rule
from ratelimits.models.accounts.named import accounts_now
from ratelimits.models.keys import COUNTED, KeyKind
from ratelimits.models.rule_parts.coverage import Callers
from ratelimits.quota.standings import UNAVAILABLE
from ratelimits.rules import groups
from ratelimits.rules.selection import GLOBAL_KEY
from ratelimits.usage.models import Line

#: Length of a bin of the ledger, in seconds.
BIN = 900
#: Keys with usage in the last LOOK_BACK seconds are counted.
LOOK_BACK = 86_400
#: Spans of time (s) until now, for which usage is compared with the limit.
_CHECKED_SPANS = (BIN, 3_600, LOOK_BACK)
#: Maximum number of ledger lines that are read. The newest lines are read first.
MAX_LINES = 50_000
#: Maximum number of keys that are counted.
MAX_KEYS = 2_000
#: Maximum number of keys whose remaining permits are read from Redis.
MAX_PEEKS = 200


class _KeyUsage(NamedTuple):
    """The admitted units of a key, by the start of the bin (15 minutes) in which they were admitted."""

    key: str
    account: str
    units: dict[int, int]


@dataclass(frozen=True, slots=True)
class Affected:
    """The keys that the rule applies to, among the keys with usage in the last 24 hours.

    count             the number of these keys
    above_limit       the number of these keys that are above the limit now; None if this number is not known
    has_more          whether there may be more keys than `count`
    refuses_everyone  whether the rule would refuse all these keys; True only for an enforced rule without a group
    in_ledger         whether the ledger names these keys. (It names no addresses, and no keys that views give.)
    are_accounts      whether these keys are accounts
    """

    count: int
    above_limit: int | None
    has_more: bool
    refuses_everyone: bool
    in_ledger: bool = True
    are_accounts: bool = False

    @property
    def text(self) -> str:
        """Return the numbers as sentences."""
        if not self.in_ledger:
            sentences = [_("The ledger does not name the keys that this rule counts, so their number is not known.")]
        else:
            sentences = [self._count_sentence()]
        if self.refuses_everyone:
            sentences.append(_("Everyone would be refused."))
        elif self.in_ledger and self.above_limit is None:
            sentences.append(
                _("The ledger does not show how many of these accounts are above the limit.")
                if self.are_accounts
                else _("The ledger does not show how many of these keys are above the limit.")
            )
        elif self.count:
            sentences.append(self._above_sentence(self.above_limit or 0))
        return " ".join(sentences)

    def _count_sentence(self) -> str:
        if self.has_more and self.are_accounts:
            text = ngettext(
                "Applies to at least %(n)s account of the last 24 hours.",
                "Applies to at least %(n)s accounts of the last 24 hours.",
                self.count,
            )
        elif self.has_more:
            text = ngettext(
                "Applies to at least %(n)s key of the last 24 hours.",
                "Applies to at least %(n)s keys of the last 24 hours.",
                self.count,
            )
        elif self.are_accounts:
            text = ngettext(
                "Applies to %(n)s account of the last 24 hours.",
                "Applies to %(n)s accounts of the last 24 hours.",
                self.count,
            )
        else:
            text = ngettext(
                "Applies to %(n)s key of the last 24 hours.", "Applies to %(n)s keys of the last 24 hours.", self.count
            )
        return text % {"n": f"{self.count:,}"}

    def _above_sentence(self, above_limit: int) -> str:
        if self.are_accounts:
            text = ngettext(
                "%(n)s of these accounts is above the limit now.",
                "%(n)s of these accounts are above the limit now.",
                above_limit,
            )
        else:
            text = ngettext(
                "%(n)s of these keys is above the limit now.",
                "%(n)s of these keys are above the limit now.",
                above_limit,
            )
        return text % {"n": f"{above_limit:,}"}


def affected(rule: Rule, algorithm: Algorithm, now: int | None = None) -> Affected:
    """Count the keys that a rule applies to, and that have usage in the 24 hours before `now` (s since 1970 UTC).

    The rule may be unsaved. If Redis has counters of the rule, the counters say which keys are above the limit.
    Otherwise the ledger says which keys are above the limit.
    """
    now = int(time.time()) if now is None else now
    is_enforced = rule.mode == Rule.Mode.ENFORCE
    if rule.key_kind in (KeyKind.IP, KeyKind.VIEW_KEY) or rule.callers == Callers.ANONYMOUS:
        refuses_everyone = algorithm.admits_nothing and is_enforced and not rule.group
        return Affected(0, None, has_more=False, refuses_everyone=refuses_everyone, in_ledger=False)
    used_keys, has_more = _usage_of_keys(rule, now)
    above_limit: int | None = None
    if algorithm.admits_nothing:
        above_limit = len(used_keys)
    elif (algorithms := _algorithms_of(algorithm, used_keys)) is not None:
        above_limit = _above_in_redis(rule, algorithms, used_keys) if _has_counters(rule) else None
        if above_limit is None and _ledger_shows_usage(rule, algorithm, now):
            above_limit = sum(_is_above(one, use.units, now) for one, use in zip(algorithms, used_keys, strict=True))
    refuses_all = algorithm.admits_nothing or (bool(used_keys) and len(used_keys) == above_limit)
    return Affected(
        len(used_keys),
        above_limit,
        has_more=has_more,
        # A rule for a group does not refuse users outside the group.
        refuses_everyone=is_enforced and not rule.group and refuses_all,
        are_accounts=rule.key_kind == KeyKind.ACCOUNT,
    )


def _ledger_shows_usage(rule: Rule, algorithm: Algorithm, now: int) -> bool:
    """Return whether the ledger shows the usage that a rule counts.

    If a rule counts only some scopes, or leases, the ledger does not show this: it stores no scopes and no leases.
    """
    _permits, length = algorithm.quota
    has_window = bool(length) or algorithm.valid_span(now * MICROSECONDS) is not None
    return rule.scope == "*" and not rule.except_scopes and has_window


def _has_counters(rule: Rule) -> bool:
    """Return whether Redis has counters of this rule.

    Redis has counters if the saved rule has the same name, algorithm, kind of key and scope, and is not off.
    """
    saved_values = {name: getattr(rule, name) for name in ("name", "algorithm", "key_kind", "scope")}
    return Rule.objects.using(conf.DATABASE).filter(pk=rule.pk, **saved_values).exclude(mode=Rule.Mode.OFF).exists()


def _algorithms_of(algorithm: Algorithm, used_keys: list[_KeyUsage]) -> list[Algorithm] | None:
    """Return the algorithm for each key, with the terms of its account; None if the accounts cannot be read."""
    if not algorithm.follows_billing:
        return [algorithm] * len(used_keys)
    accounts = [f"account:{use.account}" if use.account else None for use in used_keys]
    try:
        snapshot = rules.current().with_rows_of(*(Identity(account=account) for account in accounts))
        return [algorithm.in_periods_of(snapshot.period_terms(account)) for account in accounts]
    except rules.RulesUnavailable:
        return None


def _above_in_redis(rule: Rule, algorithms: list[Algorithm], used_keys: list[_KeyUsage]) -> int | None:
    """Return the number of keys whose next request would be refused.

    Return None if Redis does not answer, or if there are more than `MAX_PEEKS` keys.
    """
    if len(used_keys) > MAX_PEEKS:
        return None
    refused = 0
    try:
        for use, algorithm in zip(used_keys, algorithms, strict=True):
            limit = Limit(use.key, algorithm, rule.name)
            refused += not peek([limit], timeout=float(rule.max_wait or 0), account=_place(use)).allowed
    except UNAVAILABLE:
        return None
    return refused


def _place(use: _KeyUsage) -> str:
    """Return the account if its shard has the counters of the key; "" if they are in the shard of the key itself."""
    identity = Identity(user=use.key, api_key=use.key, account=f"account:{use.account}" if use.account else None)
    return use.account if use.key.startswith(kinds_in_account(identity)) else ""


def _is_above(algorithm: Algorithm, units: dict[int, int], now: int) -> bool:
    """Return whether the units in these bins are more than the rule admits."""
    permits, length = algorithm.quota
    window = algorithm.valid_span(now * MICROSECONDS)
    if window is not None:
        start, _end = window
        return _since(units, start // MICROSECONDS) > permits
    assert length is not None
    # In a span of time, a rule can admit all its permits, and then the permits that come back during the span.
    return any(
        _since(units, now - span) > permits * (1 + Fraction(span * MICROSECONDS, length)) for span in _CHECKED_SPANS
    )


def _since(units: dict[int, int], moment: int) -> int:
    """Return the sum of the units in bins that start at this moment (s since 1970 UTC) or later."""
    return sum(count for start, count in units.items() if start >= moment)


def _usage_of_keys(rule: Rule, now: int) -> tuple[list[_KeyUsage], bool]:
    """Return the usage of at most `MAX_KEYS` keys that the rule applies to, and whether there may be more such keys."""
    newest = Line.objects.using(conf.DATABASE).filter(bin__gte=now - LOOK_BACK, meter=rule.meter)
    rows = newest.order_by("-bin").values_list("key", "account", "bin", "admitted_units")[:MAX_LINES]
    # By key and account: the admitted units, by the start of their bin.
    units_of: dict[tuple[str, str], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    lines = list(rows)
    has_unnamed = False
    for key, account, start, units in lines:
        has_unnamed |= _is_unnamed(rule, key, account)
        if rule.callers == Callers.AUTHENTICATED and not key.startswith(("user:", "api_key:")):
            continue
        if _counted_key(rule, key, account) is not None:
            units_of[key, account][start] += units
    if rule.group:
        users = {pair: _user_of(*pair) for pair in units_of}
        groups_of = groups.read({user for user in users.values() if user})
        units_of = {
            pair: units for pair, units in units_of.items() if rule.group in groups_of.get(users[pair] or "", ())
        }
    was_cut = len(lines) >= MAX_LINES or len(units_of) > MAX_KEYS
    busiest = sorted(units_of, key=lambda pair: -sum(units_of[pair].values()))[:MAX_KEYS]
    usage: dict[str, _KeyUsage] = {}
    for key, account in _limited_by(rule, busiest):
        counted_key = _counted_key(rule, key, account)
        assert counted_key is not None
        use = usage.setdefault(counted_key, _KeyUsage(counted_key, account, defaultdict(int)))
        for start, units in units_of[key, account].items():
            use.units[start] += units
    return list(usage.values()), (was_cut or has_unnamed) and rule.key_kind != KeyKind.GLOBAL


def _user_of(key: str, account: str) -> str | None:
    """Return the user of a line; None if it has none, or is not known. A line names the API key, if there is one."""
    return key if key.startswith("user:") else user_of_account(account)


def _counted_key(rule: Rule, key: str, account: str) -> str | None:
    """Return the key under which a rule counts the requests of a line; None if it counts none, or is not known."""
    if rule.key_kind == KeyKind.GLOBAL:
        return GLOBAL_KEY
    if rule.key_kind == KeyKind.ACCOUNT:
        return f"account:{account}" if account else None
    if rule.key_kind in (KeyKind.USER, KeyKind.CALLER) and (user := _user_of(key, account)) is not None:
        return user
    return key if key.partition(":")[0] in COUNTED[rule.key_kind] else None


def _is_unnamed(rule: Rule, key: str, account: str) -> bool:
    """Return whether a line can have requests that the rule counts under a key that the line does not name."""
    if rule.key_kind in (KeyKind.GLOBAL, KeyKind.ACCOUNT) or _counted_key(rule, key, account) is not None:
        return False
    if key.startswith(("user:", "api_key:")):
        # The account is the API key itself only if the request has no user.
        return rule.key_kind == KeyKind.USER and account != key
    # Requests without an account: of addresses, and of users and API keys to which the project gives no account.
    by_address = rule.key_kind == KeyKind.CALLER and rule.callers != Callers.AUTHENTICATED
    return by_address or conf.ACCOUNT is not None


def _limited_by(rule: Rule, keys: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the pairs (key, account) that this rule applies to.

    Rules of several plans may have the same name. Then the rule of the key's plan applies. If the key's plan has no
    rule with this name, the rule of the account's plan applies. If the account's plan has none either, the rule without
    a plan applies.
    """
    same_name = Rule.objects.using(conf.DATABASE).filter(name=rule.name).exclude(pk=rule.pk).exclude(plan=None)
    plans = {*same_name.values_list("plan_id", flat=True), rule.plan_id}
    if plans == {None}:  # All rules with this name are default rules.
        return keys
    now = moments.now()
    memberships = PlanMembership.objects.using(conf.DATABASE).filter(key__in={key for key, _account in keys})
    memberships = memberships.exclude(valid_from__gt=now).exclude(valid_until__lte=now).filter(plan__in=plans - {None})
    plan_of_key = dict(memberships.values_list("key", "plan"))
    accounts = accounts_now(conf.DATABASE, {account for _key, account in keys if account})
    plan_of_account = {text: row.plan_id for text, row in accounts.items() if row.plan_id in plans - {None}}
    return [
        (key, account) for key, account in keys if plan_of_key.get(key, plan_of_account.get(account)) == rule.plan_id
    ]
