"""The inspector's tables of refusals."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from django.contrib.admin import AdminSite
from django.template.loader import render_to_string
from django.utils.translation import gettext as _

from ratelimits.admin.inspect.access import targets_of
from ratelimits.admin.operate.chosen_key import list_url, may_view, row_url
from ratelimits.conf import conf
from ratelimits.identity import Identity
from ratelimits.models import Rule
from ratelimits.moments import moment, when
from ratelimits.status.additions import InspectedKey, Panel
from ratelimits.status.keys import MAX_KEYS, keys_of_account
from ratelimits.usage.admin.rule_histories import PastRule, RuleHistories
from ratelimits.usage.ledger.watermark import complete_until
from ratelimits.usage.models import Line
from ratelimits.usage.models.totals import DAY, QUARTER
from ratelimits.usage.recording import refused_requests
from ratelimits.usage.status.facts import before_first_drain
from ratelimits.usage.status.refusals import (
    MAX_REFUSALS,
    RefusedRequests,
    blocked_lately,
    refused_at,
    refused_by_day,
    refused_lately,
    span_at,
    with_meters_joined,
)

#: Maximum number of lines about the newest refusals at the top of the page.
_MAX_NEWEST = 5
_MINUTE = 60
#: Maximum number of recorded requests that are shown.
_MAX_RECORDED = 10


class ShownRefusal(NamedTuple):
    """A row of the table of refusals.

    span      the quarter of an hour or the day, in UTC
    by        the block that refused, or the rule with its name and plan at that time
    sentence  the rule with its numbers at that time, if it was edited or deleted later; otherwise ""
    note      says that the rule was edited or deleted later; "" if it was not
    url       URL of the rule's page; "" if there is no link
    history   URL of the page with all changes of the rule; "" if there is no link
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
    """A line about the refusals by one rule or block in a span of time. It joins the rows of all meters and keys.

    span     the quarter of an hour, in UTC; the day for refusals of more than 24 hours ago
    by       the block, or the rule as a sentence with its numbers at that time
    denied   the number of refused requests
    shadow   the number of requests that a rule in shadow mode would have refused
    keys     the key, or the number of keys; "" on the page of a single key
    note     says that the rule was edited or deleted later; "" if it was not
    url      URL of the rule's page; "" if there is no link
    history  URL of the page with all changes of the rule; "" if there is no link
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

    asked_span       the span that contains the moment for which the user asks; "" if the user asks for no moment
    span_notes       sentences that say why this span is longer than a minute, and what is known about the minute
    in_asked_span    the refusals of this span, one for each rule
    newest           the newest refusals of 24 hours, one for each rule and quarter of an hour
    recorded         recorded requests that were refused: those of the minute for which the user asks, or otherwise the
                     newest ones. Each is a pair: its moment in UTC, and its scope
    lately           the refusals of 24 hours, by quarter of an hour and meter
    by_day           the refusals of 30 days, by day
    has_more         whether there are more refusals than these lists have
    complete_until   the moment until which all usage is known; "" if no such moment is known
    nothing_drained  a text that says that nothing was drained yet, and what to start; "" after the first drain
    why_unknown      the reason why refusals by rules are not known; "" if they are known
    of_account       whether these are the refusals of all keys of an account
    """

    asked_span: str
    span_notes: list[str]
    in_asked_span: list[RefusedLately]
    newest: list[RefusedLately]
    recorded: list[tuple[str, str]]
    lately: list[ShownRefusal]
    by_day: list[ShownRefusal]
    has_more: bool
    complete_until: str
    nothing_drained: str
    why_unknown: str
    of_account: bool


def refusal_panels(asked: InspectedKey) -> Iterator[Panel]:
    """Yield the newest refusals, and the tables of all refusals with the keys of an account.

    Yield nothing for a user who may not view ledger lines.
    """
    request, site, identity, key = asked.request, asked.site, asked.identity, asked.key
    if not may_view(request, site, Line):
        return
    pages = row_url(request, site, Rule), row_url(request, site, Rule, "history")
    context: dict[str, Any] = {
        "refusals": shown_refusals(identity, key, asked.now, *pages, asked.at),
        "records": bool(conf.RECORD_SAMPLE),
        "lines_url": _lines_url(site, identity),
        "account": identity.account_id,
        "account_url": asked.account_url,
        "is_user": identity.user is not None,
    }
    if identity.account == key:
        keys = keys_of_account(identity.account_id)
        urls = [(name, asked.url_of(name, identity.account_id)) for name in keys[:MAX_KEYS]]
        context |= {"keys": urls, "more_keys": len(keys) > MAX_KEYS}
    yield Panel(render_to_string("ratelimits/admin/inspect_lately.html", context), leads=True)
    yield Panel(render_to_string("ratelimits/admin/inspect_all_refusals.html", context))


def _lines_url(site: AdminSite, identity: Identity) -> str:
    if not identity.account_id:
        return ""
    return list_url(site, Line, {"q": " ".join(filter(None, (identity.account_id, identity.narrowest_key)))})


def shown_refusals(
    identity: Identity, inspected: str, now: float, rule_page: str, history_page: str, at: int | None = None
) -> Refusals:
    """Return the refusals of a key in 24 hours and in 30 days, and around the moment `at` (s since 1970 UTC).

    `inspected` is the key as people write it, and `identity` is its identity. `rule_page` and `history_page` are URLs
    of a rule's page and of the page with its changes. They have "{}" in place of the primary key. A URL is "" if the
    user may not open the page.
    """
    pages = rule_page, history_page
    account, key = identity.account_id, identity.narrowest_key or ""
    if not account:
        return _refusals_by_blocks(identity, inspected, now, pages, at)
    lately, by_day = refused_lately(account, key, now), refused_by_day(account, key, now)
    in_span = [] if at is None else refused_at(account, key, at, now)
    histories = RuleHistories({(row.rule, row.start) for row in (*lately, *by_day, *in_span)})
    until = complete_until(conf.DATABASE, account)
    span = 0 if at is None else span_at(at, now)
    recorded = _recorded(identity, lately, now, at)
    return Refusals(
        asked_span=_asked_span(at, span),
        span_notes=_span_notes(at, span, recorded),
        in_asked_span=list(_joined_lines(in_span, pages, histories, of_account=not key)),
        newest=list(_joined_lines(lately, pages, histories, of_account=not key)),
        recorded=recorded,
        lately=list(_shown_rows(lately, pages, histories)),
        by_day=list(_shown_rows(by_day, pages, histories)),
        has_more=max(len(lately), len(by_day)) > MAX_REFUSALS,
        complete_until=when(until) if until else "",
        nothing_drained="" if until else before_first_drain(conf.DATABASE),
        why_unknown="",
        of_account=not key,
    )


def _refusals_by_blocks(
    identity: Identity, inspected: str, now: float, pages: tuple[str, str], at: int | None
) -> Refusals:
    """Return the refusals of a key without an account. Only refusals by blocks are known."""
    blocked = blocked_lately(targets_of(identity, inspected), now)
    why_unknown = _(
        "Usage without an account is counted in one sum, so refusals by rules are not known for a single address or"
        " key. Refusals by blocks are known. If a network is blocked, the number is the sum for all addresses of the"
        " network."
    )
    histories = RuleHistories(set())
    in_span = [row for row in blocked if at is not None and row.start == at // QUARTER * QUARTER]
    recorded = _recorded(identity, blocked, now, at)
    return Refusals(
        asked_span=_asked_span(at, QUARTER),
        span_notes=_span_notes(at, QUARTER, recorded),
        in_asked_span=list(_joined_lines(in_span, pages, histories, of_account=False)),
        newest=list(_joined_lines(blocked, pages, histories, of_account=False)),
        recorded=recorded,
        lately=list(_shown_rows(blocked, pages, histories)),
        by_day=[],
        has_more=len(blocked) > MAX_REFUSALS,
        complete_until="",
        nothing_drained=before_first_drain(conf.DATABASE),
        why_unknown=why_unknown,
        of_account=False,
    )


def _asked_span(at: int | None, seconds: int) -> str:
    """Return the span with this length (s) that contains a moment, as text; "" if there is no moment."""
    return "" if at is None else _span_text(at // seconds * seconds, seconds)


def _span_notes(at: int | None, seconds: int, recorded: list[tuple[str, str]]) -> list[str]:
    """Return sentences that say which span is shown for a moment; an empty list if there is no moment."""
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

    With `at`, return the requests of the minute that contains `at`. Otherwise look at the quarters of an hour in which
    `rows` have refusals. The ledger does not have the usage of the last minute yet. So also look at the current quarter
    and the quarter before.
    """
    if at is not None:
        found = refused_requests(identity, [at // _MINUTE * _MINUTE], _MINUTE, _MAX_RECORDED)
        return [(f"{moment(row.at):%Y-%m-%d %H:%M:%S}", row.scope) for row in found]
    current = int(now) // QUARTER * QUARTER
    starts = {current, current - QUARTER, *sorted({row.start for row in rows}, reverse=True)[:_MAX_NEWEST]}
    found = refused_requests(identity, starts, QUARTER, _MAX_RECORDED)
    return [(f"{moment(row.at):%Y-%m-%d %H:%M:%S}", row.scope) for row in found]


def _joined_lines(
    rows: list[RefusedRequests], pages: tuple[str, str], histories: RuleHistories, *, of_account: bool
) -> Iterator[RefusedLately]:
    """Yield a line for the refusals by one rule or block in one span of time, at most `_MAX_NEWEST` lines.

    `pages` are the URLs `rule_page` and `history_page` of `shown_refusals`.
    """
    by_rule: dict[tuple[int, int, str], list[RefusedRequests]] = {}
    for row in with_meters_joined(rows[:MAX_REFUSALS]):
        by_rule.setdefault((row.start, row.rule, row.target), []).append(row)
    for group in islice(by_rule.values(), _MAX_NEWEST):
        rule = _refusing_rule(group[0], histories)
        by = f"{rule.name}: {rule.sentence}{rule.plan}" if rule.sentence else rule.name + rule.plan
        keys = group[0].key if len(group) == 1 else _("%s keys") % len(group)
        denied, shadow = sum(row.denied for row in group), sum(row.shadow for row in group)
        url, history = _urls(group[0], pages, histories)
        yield RefusedLately(
            span=_span(group[0]),
            by=by,
            denied=f"{denied:,}",
            shadow=f"{shadow:,}",
            keys=keys if of_account else "",
            note=rule.note,
            url=url,
            history=history,
        )


def _refusing_rule(row: RefusedRequests, histories: RuleHistories) -> PastRule:
    """Return the rule that refused, as it was at that time. For a block, return a `PastRule` that names the block."""
    if row.rule:
        return histories.at(row.rule, row.start, row.seconds)
    return PastRule(_("block of %s") % row.target if row.target else _("a block"))


def _urls(row: RefusedRequests, pages: tuple[str, str], histories: RuleHistories) -> tuple[str, str]:
    """Return the URLs of the rule's page and of its changes. A deleted rule has no page. A block has no URL."""
    rule_page, history_page = pages
    return (
        rule_page.format(row.rule) if row.rule in histories.current_names else "",
        history_page.format(row.rule) if row.rule else "",
    )


def _shown_rows(
    rows: list[RefusedRequests], pages: tuple[str, str], histories: RuleHistories
) -> Iterator[ShownRefusal]:
    for row in rows[:MAX_REFUSALS]:
        rule = _refusing_rule(row, histories)
        url, history = _urls(row, pages, histories)
        yield ShownRefusal(
            span=_span(row),
            key=row.key,
            by=rule.name + rule.plan,
            sentence=rule.sentence if rule.note else "",
            note=rule.note,
            url=url,
            history=history,
            meter=row.meter,
            denied=f"{row.denied:,}",
            shadow=f"{row.shadow:,}",
        )


def _span(row: RefusedRequests) -> str:
    return _span_text(row.start, row.seconds)


def _span_text(first: int, seconds: int) -> str:
    start, end = moment(first * 1_000_000), moment((first + seconds) * 1_000_000)
    return f"{start:%Y-%m-%d}" if seconds == DAY else f"{start:%Y-%m-%d %H:%M}–{end:%H:%M}"
