"""The inspector's tables of blocks, usage and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from ipaddress import ip_network
from itertools import islice
from typing import Any, NamedTuple

from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext as _

from ratelimits.admin.inspect.rule_names import RuleNames, RuleThen
from ratelimits.admin.operate.access import requests_of
from ratelimits.conf import conf
from ratelimits.engine.keys import ledger_name
from ratelimits.identity import Identity
from ratelimits.models import Access
from ratelimits.models.ledger import moment, when
from ratelimits.models.status.totals import DAY, QUARTER
from ratelimits.recording.trace import refused_requests
from ratelimits.reports.present import MeterUse, present_usage
from ratelimits.reports.terms import TermsBook
from ratelimits.rules import Snapshot
from ratelimits.status.first_drain import before_first_drain
from ratelimits.status.refusals import (
    MAX_REFUSALS,
    RefusedRequests,
    blocked_lately,
    refused_at,
    refused_by_day,
    refused_lately,
    span_at,
    with_meters_joined,
)
from ratelimits.usage.complete import complete_until

#: Blocks and allows are shown until this time after their end.
_SHOWN_AFTER_END = timedelta(hours=25)
#: Maximum number of blocks and allows that are shown.
_MAX_ACCESS = 50
#: Maximum number of lines about the newest refusals at the top of the page.
_MAX_NEWEST = 5
_MINUTE = 60
#: Maximum number of recorded requests that are shown.
_MAX_RECORDED = 10


class ShownAccess(NamedTuple):
    """A block or allow of the inspected key, or of a network that contains its address.

    decides   whether this row decides about requests of the key now
    requests  the number of requests in 24 hours that the row refused or exempted
    """

    row: Access
    state: str
    decides: bool
    requests: str


class ShownRefusal(NamedTuple):
    """A row of the table of refusals.

    span      the quarter of an hour or the day, in UTC
    by        the rule, with the name and the plan that it had then, or the block that refused
    sentence  the rule with its numbers of then, if it was edited or deleted since; otherwise ""
    note      what became of the rule since then; "" if nothing
    url       the rule's page; "" for none
    history   the page with all changes of the rule; "" for none
    denied    the number of refused requests
    shadow    the number of requests that a rule in shadow mode would have refused
    """

    span: str
    key: str
    by: str
    sentence: str
    note: str
    url: str
    history: str
    meter: str
    denied: str
    shadow: str


class RefusedLately(NamedTuple):
    """A line about the refusals by one rule or block in a quarter of an hour. The rows of its meters are joined.

    by       the rule as a sentence with its numbers of then, or the block
    keys     the key, or the number of keys; "" on the page of a single key
    note     what became of the rule since then; "" if nothing
    url      the rule's page; "" for none
    history  the page with all changes of the rule; "" for none
    """

    span: str
    by: str
    denied: str
    shadow: str
    keys: str
    note: str
    url: str
    history: str


class Refusals(NamedTuple):
    """The refusals of a key or of a whole account.

    asked       the span that contains the moment for which the user asks; "" if the user asks for no moment
    about       sentences about this span: why it is longer than a minute, and what is known of the minute
    then        the refusals of this span, one for each rule
    newest      the newest refusals of 24 hours, one for each rule and quarter of an hour
    recorded    recorded requests that were refused, each as its moment in UTC and its scope: those of the minute for
                which the user asks, or else the newest ones
    lately      the refusals of 24 hours, by quarter of an hour and meter
    by_day      the refusals of 30 days, by day
    more        whether there are more refusals than these lists have
    until       the moment until which all usage is known; "" if no such moment is known
    undrained   before the first drain: a text that says so, and what to start; "" after it
    why_none    the reason why refusals by rules are not known; "" if they are known
    of_account  whether the refusals are those of all keys of an account
    """

    asked: str
    about: list[str]
    then: list[RefusedLately]
    newest: list[RefusedLately]
    recorded: list[tuple[str, str]]
    lately: list[ShownRefusal]
    by_day: list[ShownRefusal]
    more: bool
    until: str
    undrained: str
    why_none: str
    of_account: bool


def shown_access(identity: Identity, snapshot: Snapshot) -> list[ShownAccess]:
    """Return the blocks and allows of an identity's keys and networks.

    Some are in force, some begin later, and some have ended in the last 25 hours.
    """
    now, targets = timezone.now(), targets_of(identity)
    rows = Access.objects.using(conf.DATABASE).filter(target__in=targets)
    rows = rows.filter(Q(valid_until=None) | Q(valid_until__gt=now - _SHOWN_AFTER_END)).order_by("-pk")
    deciding, counts = snapshot.access(identity), requests_of(targets)
    accesses = []
    for row in rows[:_MAX_ACCESS]:
        begins_later = row.valid_from is not None and row.valid_from > now
        state = _("in force") if row.in_force(now) else _("later") if begins_later else _("ended")
        requests = f"{counts.get(ledger_name(row.target), 0):,}"
        accesses.append(ShownAccess(row, state, deciding is not None and deciding.pk == row.pk, requests))
    return accesses


def targets_of(identity: Identity) -> list[str]:
    """Return all targets of blocks and allows that concern an identity: its keys, and the networks of its address."""
    targets = [key for key in (identity.api_key, identity.user, identity.account, identity.address) if key]
    try:
        address = ip_network((identity.address or "")[3:])
    except ValueError:  # There is no address, or it cannot be read.
        return targets
    return targets + [f"ip:{address.supernet(new_prefix=length)}" for length in range(address.prefixlen)]


def shown_usage(account: str, now: float) -> dict[str, Any]:
    """Return an account's usage in the current billing period, and the quantities that the account's plan includes."""
    terms = TermsBook(conf.DATABASE).of([account])[account]
    period, meters = present_usage(conf.DATABASE, account, terms, int(now * 1_000_000))
    return {
        "start": when(period.start),
        "end": when(period.end),
        "plan": terms.plan,
        "meters": [_meter_texts(use) for use in meters],
    }


def _meter_texts(use: MeterUse) -> tuple[str, str, str, str]:
    """Return texts about the use of a meter: the unit, the used units, the included units, and what is left of them.

    If more units were used than are included, the last text has the number of units above the included quantity.
    """
    unit, used = conf.UNITS.get(use.meter, use.meter), f"{use.used:,}"
    if not use.included:
        return unit, used, "–", "–"
    remaining = _("%s beyond") % f"{use.overage:,}" if use.overage else _("%s left") % f"{use.remaining:,}"
    return unit, used, f"{use.included:,}", remaining


def shown_refusals(
    identity: Identity, now: float, rule_page: str, history_page: str, at: int | None = None
) -> Refusals:
    """Return the refusals of a key in 24 hours and in 30 days, and around the moment `at` (s since 1970 UTC).

    `rule_page` is the URL of a rule's page, with "{}" in place of the primary key, and `history_page` that of the page
    with its changes. They are "" if links are not wanted.
    """
    pages = rule_page, history_page
    account, key = identity.account_id, identity.narrowest_key or ""
    if not account:
        blocked = blocked_lately(targets_of(identity), now)
        why = _(
            "Usage without an account is counted in one sum, so refusals by rules are not known for a single address or"
            " key. Refusals by blocks are known. For the block of a network they are one sum for all its addresses."
        )
        names = RuleNames(set())
        then = [row for row in blocked if at is not None and row.start == at // QUARTER * QUARTER]
        recorded = _recorded(identity, blocked, now, at)
        return Refusals(
            _asked(at, QUARTER),
            _about(at, QUARTER, recorded),
            list(_newest(then, pages, names, of_account=False)),
            list(_newest(blocked, pages, names, of_account=False)),
            recorded,
            list(_shown_rows(blocked, pages, names)),
            [],
            len(blocked) > MAX_REFUSALS,
            "",
            before_first_drain(conf.DATABASE),
            why,
            False,
        )
    lately, by_day = refused_lately(account, key, now), refused_by_day(account, key, now)
    then = [] if at is None else refused_at(account, key, at, now)
    names = RuleNames({(row.rule, row.start) for row in (*lately, *by_day, *then)})
    until = complete_until(conf.DATABASE, f"account:{account}")
    span = 0 if at is None else span_at(at, now)
    recorded = _recorded(identity, lately, now, at)
    return Refusals(
        _asked(at, span),
        _about(at, span, recorded),
        list(_newest(then, pages, names, of_account=not key)),
        list(_newest(lately, pages, names, of_account=not key)),
        recorded,
        list(_shown_rows(lately, pages, names)),
        list(_shown_rows(by_day, pages, names)),
        max(len(lately), len(by_day)) > MAX_REFUSALS,
        when(until) if until else "",
        "" if until else before_first_drain(conf.DATABASE),
        "",
        not key,
    )


def _asked(at: int | None, seconds: int) -> str:
    """Return the span of this length that contains a moment; "" for no moment."""
    return "" if at is None else _span_text(at // seconds * seconds, seconds)


def _about(at: int | None, seconds: int, recorded: list[tuple[str, str]]) -> list[str]:
    """Return sentences that say where the refusals around a moment come from; an empty list for no moment."""
    if at is None:
        return []
    minute = f"{moment(at * 1_000_000):%H:%M}"
    if seconds == DAY:
        text = _(
            "You asked for %(minute)s. Refusals of more than 24 hours ago are counted by day: this is the whole day."
        )
    else:
        text = _("You asked for %(minute)s. Refusals are counted by quarter of an hour: this is the whole quarter.")
    sentences = [text % {"minute": minute}]
    if recorded:
        sentences.append(_("The recorder stored single requests, but not which rule refused them."))
    elif conf.RECORD_SAMPLE:
        sentences.append(_("The recorder has no refused request of this key in this minute."))
    else:
        sentences.append(_("Single requests are not recorded, so the minute itself is not known."))
    return sentences


def _recorded(
    identity: Identity, rows: list[RefusedRequests], now: float, at: int | None = None
) -> list[tuple[str, str]]:
    """Return the moments and scopes of the newest recorded requests of an identity that were refused.

    With `at`, return those of this minute. Otherwise look in the quarters of an hour of the newest refusals, and in the
    newest two: the ledger is about a minute late.
    """
    if at is not None:
        found = refused_requests(identity, [at // _MINUTE * _MINUTE], _MINUTE, _MAX_RECORDED)
        return [(f"{moment(row.at):%Y-%m-%d %H:%M:%S}", row.scope) for row in found]
    current = int(now) // QUARTER * QUARTER
    starts = {current, current - QUARTER, *sorted({row.start for row in rows}, reverse=True)[:_MAX_NEWEST]}
    found = refused_requests(identity, starts, QUARTER, _MAX_RECORDED)
    return [(f"{moment(row.at):%Y-%m-%d %H:%M:%S}", row.scope) for row in found]


def _newest(
    rows: list[RefusedRequests], pages: tuple[str, str], names: RuleNames, *, of_account: bool
) -> Iterator[RefusedLately]:
    """Yield a line for each rule or block and quarter of an hour, at most `_MAX_NEWEST`."""
    by_rule: dict[tuple[int, int, str], list[RefusedRequests]] = {}
    for row in with_meters_joined(rows[:MAX_REFUSALS]):
        by_rule.setdefault((row.start, row.rule, row.target), []).append(row)
    for group in islice(by_rule.values(), _MAX_NEWEST):
        rule = _by(group[0], names)
        by = f"{rule.name}: {rule.sentence}{rule.plan}" if rule.sentence else rule.name + rule.plan
        keys = group[0].key if len(group) == 1 else _("%s keys") % len(group)
        denied, shadow = sum(row.denied for row in group), sum(row.shadow for row in group)
        urls = _urls(group[0], pages, names)
        counts = f"{denied:,}", f"{shadow:,}"
        yield RefusedLately(_span(group[0]), by, *counts, keys if of_account else "", rule.note, *urls)


def _by(row: RefusedRequests, names: RuleNames) -> RuleThen:
    """Return the rule that refused, as it was then. For a block, the name says which block."""
    if row.rule:
        return names.at(row.rule, row.start, row.seconds)
    return RuleThen(_("block of %s") % row.target if row.target else _("a block"))


def _urls(row: RefusedRequests, pages: tuple[str, str], names: RuleNames) -> tuple[str, str]:
    """Return the URLs of the rule's page and of its changes. A deleted rule has only changes, a block has neither."""
    rule_page, history_page = pages
    return (
        rule_page.format(row.rule) if row.rule in names.current else "",
        history_page.format(row.rule) if row.rule else "",
    )


def _shown_rows(rows: list[RefusedRequests], pages: tuple[str, str], names: RuleNames) -> Iterator[ShownRefusal]:
    for row in rows[:MAX_REFUSALS]:
        rule = _by(row, names)
        yield ShownRefusal(
            _span(row),
            row.key,
            rule.name + rule.plan,
            rule.sentence if rule.note else "",
            rule.note,
            *_urls(row, pages, names),
            row.meter,
            f"{row.denied:,}",
            f"{row.shadow:,}",
        )


def _span(row: RefusedRequests) -> str:
    return _span_text(row.start, row.seconds)


def _span_text(first: int, seconds: int) -> str:
    start, end = moment(first * 1_000_000), moment((first + seconds) * 1_000_000)
    return f"{start:%Y-%m-%d}" if seconds == DAY else f"{start:%Y-%m-%d %H:%M}–{end:%H:%M}"
