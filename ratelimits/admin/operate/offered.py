"""The rules that can be reset for a key, or that can give the key more permits.

Rules that lately refused requests of the key come first.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ratelimits import rules
from ratelimits.algorithms.base import Wording, amount
from ratelimits.algorithms.limits import Algorithm, fields_of
from ratelimits.algorithms.windows import UNIT_NAMES
from ratelimits.conf import conf
from ratelimits.engine.keys import BIN_SECONDS
from ratelimits.identity import Identity
from ratelimits.models.fields.sentences import sentence
from ratelimits.models.keys import COVERS, key_name
from ratelimits.moments import moment
from ratelimits.rules import AppliedRule, ExplainedRule, UnreadableRule
from ratelimits.rules.selection import key_of, plain_key
from ratelimits.status.additions import registered

#: An id that no user and no API key has, because an id is never a space. It stands for any key of an account or user.
_ANY = " "
#: A day, in µs.
_DAY = 86_400_000_000


@dataclass(frozen=True, slots=True)
class OfferedRule:
    """A rule that limits a key, or that limits each key of a user or account.

    sentence           the rule in words, with the numbers that apply to the key
    unit               the unit of the rule's meter, such as "requests"
    counts_key_itself  whether the rule counts the key itself. Otherwise the rule counts each key of the user or account
                       separately
    refused_at         start of the quarter of an hour in which the rule last refused a request, in s since 1970 UTC; 0
                       if the rule refused no request in the last 24 hours, or if this is not known
    refused            the number of requests that the rule refused in the last 24 hours. It is too low if very many
                       keys were refused
    """

    name: str
    sentence: str
    unit: str
    algorithm: Algorithm
    counts_key_itself: bool
    refused_at: int
    refused: int

    @property
    def label(self) -> str:
        """Return the text of the choice in a form."""
        text = f"{self.name}: {self.sentence}"
        if not self.refused_at:
            return text
        start, end = (moment(second * 1_000_000) for second in (self.refused_at, self.refused_at + BIN_SECONDS))
        values = {"rule": text, "n": f"{self.refused:,}", "span": f"{start:%H:%M}–{end:%H:%M}"}
        return _("%(rule)s – refused %(n)s in 24 hours, last at %(span)s UTC") % values

    @property
    def grant_label(self) -> str:
        """Return the text of the choice in the form of a grant. It also says when the key gets the permits."""
        if self.window:
            return _("%(rule)s – gives more in each %(window)s") % {"rule": self.label, "window": self.window}
        return _("%(rule)s – gives more at once") % {"rule": self.label}

    @property
    def has_long_window(self) -> bool:
        """Return whether permits are counted in windows of a day or more."""
        unit: str = getattr(self.algorithm, "calendar_unit", "")
        if unit:
            return unit != "hour"
        _permits, length = self.algorithm.quota
        return bool(self.window) and length is not None and length >= _DAY

    @property
    def has_capacity(self) -> bool:
        """Return whether the rule has a capacity that a grant can raise."""
        return "capacity" in fields_of(self.algorithm.id)

    @property
    def window(self) -> str:
        """Return the name of the rule's window, such as "calendar day (UTC)"; "" if the rule has no window."""
        unit = getattr(self.algorithm, "calendar_unit", "")
        if unit:
            name = _(UNIT_NAMES[unit])
            return name if self.algorithm.follows_billing else f"{name} ({getattr(self.algorithm, 'timezone', 'UTC')})"
        names, period = fields_of(self.algorithm.id), getattr(self.algorithm, "period", None)
        if period is None or "rate" in names:  # With a rate, permits come back one by one.
            return ""
        return _("window of %(span)s") % {"span": Wording(_, ngettext).span(period)}

    def window_is_shorter_than(self, seconds: float) -> bool:
        """Return whether a window is shorter than a grant of `seconds`. Such a grant applies in several windows.

        Calendar months, years and billing periods have no fixed length, so the length of the present one is compared.
        """
        _permits, length = self.algorithm.quota
        span = self.algorithm.valid_span(time.time_ns() // 1000)
        if length is None and span is not None:
            start, end = span
            length = end - start
        return bool(self.window) and length is not None and length < seconds * 1_000_000

    def extra_text(self, extra: int) -> str:
        """Return a text for additional permits, such as "5,000 more requests in each window of 1 hour"."""
        # `amount` returns a number and a unit that fits the number: "1 request" or "2 requests".
        _number, _space, unit = amount(extra, self.unit).partition(" ")
        values = {"n": f"{extra:,}", "unit": unit, "window": self.window}
        if self.window:
            return _("%(n)s more %(unit)s in each %(window)s") % values
        return _("%(n)s more %(unit)s at once") % values


def offered_rules(identity: Identity, key: str) -> list[OfferedRule]:
    """Return the rules that limit a key. `identity` is the identity of the key.

    For a user or an account, also return the rules that limit each of its keys.

    Rules that refused a request in the last 24 hours come first, sorted by the newest refusal. The other rules follow,
    sorted by name. Rules that are off or not valid are left out. Raise RulesUnavailable if no rules can be read.
    """
    snapshot, kind = rules.reload(), key.partition(":")[0]
    # By name of the rule: the rule, and whether it counts the key itself.
    found = {
        explained.row.name: (explained, True)
        for explained in snapshot.in_any_scope(identity)
        if _counted_key(explained, identity) == key_name(key)
    }
    if kind in ("account", "user"):
        any_key = Identity(identity.user or _ANY, _ANY, identity.account)
        for explained in snapshot.in_any_scope(any_key):
            if isinstance(explained.rule, AppliedRule) and explained.rule.key_kind in COVERS[kind] - {kind}:
                found.setdefault(explained.row.name, (explained, False))
    refusals = dict(pair for added in registered for pair in added.last_refusals(identity, key))
    no_refusals = 0, 0
    offered = [
        OfferedRule(
            name=explained.row.name,
            sentence=explained_sentence(explained),
            unit=conf.UNITS.get(explained.row.meter, explained.row.meter),
            algorithm=explained.rule.algorithm,
            counts_key_itself=counts_key_itself,
            refused_at=refused_at,
            refused=refused,
        )
        for explained, counts_key_itself in found.values()
        if isinstance(explained.rule, AppliedRule)
        for refused_at, refused in [refusals.get(explained.row.pk, no_refusals)]
    ]
    return sorted(offered, key=lambda rule: (-rule.refused_at, rule.name))


def _counted_key(explained: ExplainedRule, identity: Identity) -> str | None:
    """Return the key under which a rule counts the requests of an identity; None if the rule does not apply."""
    return plain_key(key_of(identity, explained.rule.key_kind)) if isinstance(explained.rule, AppliedRule) else None


def explained_sentence(explained: ExplainedRule) -> str:
    """Return a rule as a sentence, with the numbers that apply to the key."""
    row, rule = explained.row, explained.rule
    algorithm = rule.algorithm if isinstance(rule, AppliedRule) else row.algorithm
    if isinstance(rule, UnreadableRule) or algorithm is None:
        error = row.unreadable or _("the override has numbers that are not valid")
        return _("not in force: %(error)s") % {"error": error}
    scope = f"{row.scope}:{','.join(sorted(row.methods))}" if row.methods else row.scope
    unit = conf.UNITS.get(row.meter, row.meter)
    return sentence(algorithm, unit, row, scope, sorted(row.except_scopes), row.max_wait)
