"""The inspector's tables of blocks, usage and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from ipaddress import ip_network
from typing import Any, NamedTuple

from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext as _

from ratelimits.admin.operate.access import requests_of
from ratelimits.conf import conf
from ratelimits.engine.keys import ledger_name
from ratelimits.identity import Identity
from ratelimits.models import Access, Rule
from ratelimits.models.ledger import moment, when
from ratelimits.models.status.totals import DAY
from ratelimits.reports.present import MeterUse, present_usage
from ratelimits.reports.terms import TermsBook
from ratelimits.rules import Snapshot
from ratelimits.status.refusals import MAX_REFUSALS, RefusedRequests, blocked_lately, refused_by_day, refused_lately
from ratelimits.usage.complete import complete_until

#: How long blocks and allows are shown after their end, and the maximum number of rows.
_SHOWN_FOR, _MAX_ACCESS = timedelta(hours=25), 50


class ShownAccess(NamedTuple):
    """A block or allow that applies to the key or to a network of its address."""

    row: Access
    state: str
    decides: bool
    requests: str


class ShownRefusal(NamedTuple):
    """A row of the table of refusals: the time, the rule or block that refused, and the number of requests."""

    span: str
    key: str
    by: str
    url: str
    meter: str
    denied: str
    shadow: str


class Refusals(NamedTuple):
    """The refusals of a key. `why_none` says why refusals by rules are not known; "" if they are known."""

    lately: list[ShownRefusal]
    by_day: list[ShownRefusal]
    more: bool
    until: str
    why_none: str
    of_account: bool


def shown_access(identity: Identity, snapshot: Snapshot) -> list[ShownAccess]:
    """Return the blocks and allows for an identity's keys and networks: in force, later, or ended lately."""
    now, targets = timezone.now(), targets_of(identity)
    rows = Access.objects.using(conf.DATABASE).filter(target__in=targets)
    rows = rows.filter(Q(valid_until=None) | Q(valid_until__gt=now - _SHOWN_FOR)).order_by("-pk")
    decides, counted = snapshot.access(identity), requests_of(targets)
    found = []
    for row in rows[:_MAX_ACCESS]:
        later = row.valid_from is not None and row.valid_from > now
        state = _("in force") if row.in_force(now) else _("later") if later else _("ended")
        requests = f"{counted.get(ledger_name(row.target), 0):,}"
        found.append(ShownAccess(row, state, decides is not None and decides.pk == row.pk, requests))
    return found


def targets_of(identity: Identity) -> list[str]:
    """Return the possible targets of blocks and allows for an identity: its keys, and the networks of its address."""
    targets = [key for key in (identity.api_key, identity.user, identity.account, identity.address) if key]
    try:
        address = ip_network((identity.address or "")[3:])
    except ValueError:  # no address, or one that could not be read
        return targets
    return targets + [f"ip:{address.supernet(new_prefix=length)}" for length in range(address.prefixlen)]


def shown_usage(account: str, now: float) -> dict[str, Any]:
    """Return an account's usage in its current billing period, with the quantities that its plan includes."""
    terms = TermsBook(conf.DATABASE).of([account])[account]
    period, meters = present_usage(conf.DATABASE, account, terms, int(now * 1_000_000))
    return {
        "start": when(period.start),
        "end": when(period.end),
        "plan": terms.plan,
        "meters": [_use(one) for one in meters],
    }


def _use(one: MeterUse) -> tuple[str, str, str, str]:
    """Return a meter's unit, the used and the included units, and the units that are left or beyond."""
    left = _("%s beyond") % f"{one.overage:,}" if one.overage else _("%s left") % f"{one.remaining:,}"
    unit = conf.UNITS.get(one.meter, one.meter)
    return unit, f"{one.used:,}", f"{one.included:,}" if one.included else "–", left if one.included else "–"


def shown_refusals(identity: Identity, now: float, rule_page: str) -> Refusals:
    """Return the refusals of a key in 24 hours and in 30 days.

    `rule_page` is the URL of a rule's page, with "{}" for its primary key; "" for no links.
    """
    account, key = identity.owner, identity.narrowest or ""
    if not account:
        blocked = blocked_lately(targets_of(identity), now)
        why = _(
            "Usage without an account is counted together, so refusals by rules are not known for a single address or"
            " key. What blocks refused is known: for a network, that of all its addresses together."
        )
        return Refusals(list(_shown(blocked, rule_page)), [], len(blocked) > MAX_REFUSALS, "", why, False)
    lately, by_day = refused_lately(account, key, now), refused_by_day(account, key, now)
    names = _rule_names([*lately, *by_day])
    until = complete_until(conf.DATABASE, f"account:{account}")
    return Refusals(
        list(_shown(lately, rule_page, names)),
        list(_shown(by_day, rule_page, names)),
        max(len(lately), len(by_day)) > MAX_REFUSALS,
        when(until) if until else "",
        "",
        not key,
    )


def _rule_names(rows: list[RefusedRequests]) -> dict[int, str]:
    rules = Rule.objects.using(conf.DATABASE).filter(pk__in={row.rule for row in rows})
    return dict(rules.values_list("pk", "name"))


def _shown(rows: list[RefusedRequests], rule_page: str, names: dict[int, str] | None = None) -> Iterator[ShownRefusal]:
    for row in rows[:MAX_REFUSALS]:
        name = (names or {}).get(row.rule)
        if row.rule:
            by = name or _("rule %(number)s, which was deleted") % {"number": row.rule}
        else:
            by = _("block of %s") % row.target if row.target else _("a block")
        yield ShownRefusal(
            _span(row),
            row.key,
            by,
            rule_page.format(row.rule) if name and rule_page else "",
            row.meter,
            f"{row.denied:,}",
            f"{row.shadow:,}",
        )


def _span(row: RefusedRequests) -> str:
    start, end = moment(row.start * 1_000_000), moment((row.start + row.seconds) * 1_000_000)
    return f"{start:%Y-%m-%d}" if row.seconds == DAY else f"{start:%Y-%m-%d %H:%M}–{end:%H:%M}"
