"""The page that tries a typed rule on the recorded requests of the last 24 hours. The rule is not saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any, NamedTuple

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ratelimits.admin.rule_form.recorded import LOOK_BACK, MAX_REQUESTS, ReplayResult, recorded_day, replay_result
from ratelimits.algorithms.parsing import MICROSECONDS
from ratelimits.algorithms.wording import Wording, amount, number
from ratelimits.conf import conf
from ratelimits.models import Rule
from ratelimits.models.fields.scopes import split_scope
from ratelimits.models.keys import KeyKind
from ratelimits.moments import moment
from ratelimits.quota.standings import UNAVAILABLE
from ratelimits.recording import Trace, scopes_since

#: Number of keys that are listed.
TOP = 20
#: Maximum number of scopes that a sentence names.
_MAX_SCOPES = 20
#: If the recorded requests cover less time than this (µs), the page says so.
_WHOLE_DAY = 23 * 3_600 * MICROSECONDS


class ComparedKey(NamedTuple):
    """A key, with the number of its requests.

    refused_by_typed  the number of these requests that the typed rule would have refused
    refused_too       of `refused_by_typed`, the number of requests that were also refused at the time
    newly_refused     of `refused_by_typed`, the number of requests that were admitted at the time
    admitted_now      the number of requests that were refused at the time, but that the typed rule would have admitted
    refused_by_saved  the number of these requests that the saved rule would have refused; "" without a saved rule
    """

    key: str
    requests: str
    refused_by_typed: str
    refused_too: str
    newly_refused: str
    admitted_now: str
    refused_by_saved: str


def yesterday(typed: Rule, saved: Rule | None, *, with_keys: bool) -> dict[str, Any]:
    """Return the values for the template of the page.

    `typed` is the rule that the user has typed. `saved` is the rule before the edit; None for a new rule. `with_keys`
    says whether the user may see single keys.
    """
    if typed.to_algorithm().leases:
        text = _("The recorder does not know how long requests took, so a limit on requests at once cannot be tried.")
        return {"no_result": text}
    if saved is not None and (saved.unreadable() or saved.to_algorithm().leases):
        saved = None
    trace = recorded_day(typed) if saved is None else recorded_day(typed, saved)
    if not trace.rows:
        return {"no_result": _nothing(typed)}
    try:
        typed_result = replay_result(typed, trace)
        saved_result = None if saved is None else replay_result(saved, trace)
    except UNAVAILABLE:
        return {"no_result": _("Redis or the database does not answer, so nothing could be tried.")}
    if not typed_result.requests and (saved_result is None or not saved_result.requests):
        text = _(
            "The rule counts none of the recorded requests: look at its scope, meter, kind of key, callers and plan."
        )
        return {"no_result": f"{text} {_span(trace)}", "notes": list(_notes(typed, trace))}
    return {
        "answer": _answer(typed_result, typed.key_kind),
        "verdict": f"{_span(trace)} {_verdict(typed_result, typed.key_kind)}",
        "changes": _changes(typed_result, typed.key_kind),
        "rows": _rows(saved_result, typed_result, typed),
        "compared": saved_result is not None,
        "of_accounts": typed.key_kind == KeyKind.ACCOUNT,
        "keys": _keys(saved_result, typed_result) if with_keys else [],
        "more_keys": max(len(_refused_keys(saved_result, typed_result)) - TOP, 0) if with_keys else 0,
        "notes": [*_modes(typed, saved), *_notes(typed, trace)],
    }


def _nothing(typed: Rule) -> str:
    """Return why there is nothing to replay: no request in the scope of the rule, or no recorded request at all."""
    recorded_scopes = scopes_since((time.time_ns() // 1000) - LOOK_BACK * MICROSECONDS, _MAX_SCOPES)
    if recorded_scopes:
        text = _(
            "In the last 24 hours no request in the scope %(scope)s was recorded. Scopes with requests: %(scopes)s."
        )
        scope, _methods = split_scope(typed.scope)
        return text % {"scope": scope, "scopes": ", ".join(recorded_scopes)}
    if conf.RECORD_SAMPLE:
        return _("Requests are recorded, but no request came in the last 24 hours, in any scope.")
    return _(
        "Requests are not recorded. To record them, set RATELIMITS['RECORD_SAMPLE'] to the share of accounts to"
        " record, such as 0.1. Then come back after some hours."
    )


def _answer(typed_result: ReplayResult, kind: str) -> str:
    """Return one sentence that says whether the typed rule would have refused any key, and how many."""
    all_keys, refused = _count_text(kind, len(typed_result.requests)), len(typed_result.refused)
    if not refused:
        return _("No: none of %(keys)s would have been refused.") % {"keys": all_keys}
    text = _("Yes: %(n)s of %(keys)s would have been refused at least once.")
    return text % {"n": f"{refused:,}", "keys": all_keys}


def _span(trace: Trace) -> str:
    """Return a sentence about the time of the recorded requests: from the first to the last."""
    first, last = moment(trace.rows[0].at), moment(trace.rows[-1].at)
    minutes = max(round((last - first).total_seconds() / 60), 1)
    span = Wording(_, ngettext).span(Decimal(60 * minutes))
    end = f"{last:%H:%M}" if first.date() == last.date() else f"{last:%Y-%m-%d %H:%M}"
    values = {"first": f"{first:%Y-%m-%d %H:%M}", "last": end, "span": span}
    return _("Requests recorded from %(first)s to %(last)s UTC, %(span)s.") % values


def _count_text(kind: str, count: int) -> str:
    """Return a number of keys of a kind as text."""
    if kind == KeyKind.ACCOUNT:
        return ngettext("%(n)s account", "%(n)s accounts", count) % {"n": f"{count:,}"}
    return ngettext("%(n)s key", "%(n)s keys", count) % {"n": f"{count:,}"}


def _verdict(typed_result: ReplayResult, kind: str) -> str:
    refused, keys = sum(typed_result.refused.values()), len(typed_result.refused)
    if not refused:
        return _("The typed rule would have refused nobody.")
    requests = ngettext("%(n)s request", "%(n)s requests", refused) % {"n": f"{refused:,}"}
    values = {"requests": requests, "keys": _count_text(kind, keys)}
    text = _("The typed rule would have refused %(requests)s of %(keys)s.") % values
    return f"{text} {_newly_refused_text((typed_result.refused - typed_result.refused_too).total(), refused)}"


def _newly_refused_text(newly: int, refused: int) -> str:
    if not newly:
        return _("All of these requests were also refused at the time.")
    if newly == refused:
        return _("All of these requests were admitted at the time.")
    text = ngettext(
        "%(n)s of these requests was admitted at the time.", "%(n)s of these requests were admitted at the time.", newly
    )
    return text % {"n": f"{newly:,}"}


def _changes(typed_result: ReplayResult, kind: str) -> list[tuple[str, str, str, str]]:
    """Return the rows of the comparison with what happened at the time. Each row has a title and three numbers.

    1. refused by the typed rule, and also refused at the time
    2. refused by the typed rule, but admitted at the time
    3. refused at the time, but admitted by the typed rule
    """
    newly_refused = typed_result.refused - typed_result.refused_too
    columns = typed_result.refused_too, newly_refused, typed_result.admitted_now
    refused_too, newly, admitted_now = (number(column.total()) for column in columns)
    keys_refused_too, keys_newly, keys_admitted_now = (number(len(column)) for column in columns)
    return [
        (_("requests"), refused_too, newly, admitted_now),
        (_keys_word(kind), keys_refused_too, keys_newly, keys_admitted_now),
    ]


def _keys_word(kind: str) -> str:
    return _("accounts") if kind == KeyKind.ACCOUNT else _("keys")


def _rows(saved_result: ReplayResult | None, typed_result: ReplayResult, typed: Rule) -> list[tuple[str, str, str]]:
    """Return the rows of the comparison between the saved rule and the typed rule.

    Each row has a title, the value for the saved rule, and the value for the typed rule. If there is no saved
    rule, its value is "". The rows about refused requests are then left out, because the sentence above the table has
    these numbers.
    """
    words, unit = Wording(_, ngettext), conf.UNITS.get(typed.meter, typed.meter)
    rows: list[tuple[str, Callable[[ReplayResult], str]]] = [
        (_("requests that the rule counts"), lambda result: number(sum(result.requests.values()))),
        (_keys_word(typed.key_kind), lambda result: number(len(result.requests))),
        (_("admitted, and so billed"), lambda result: amount(result.admitted_units, unit)),
    ]
    if saved_result is not None:
        keys_refused = _("keys with refused requests")
        if typed.key_kind == KeyKind.ACCOUNT:
            keys_refused = _("accounts with refused requests")
        rows += [
            (_("refused requests"), lambda result: number(sum(result.refused.values()))),
            (keys_refused, lambda result: number(len(result.refused))),
            (_("not admitted, and so not billed"), lambda result: amount(result.units - result.admitted_units, unit)),
        ]
    if typed_result.longest_wait or (saved_result is not None and saved_result.longest_wait):
        rows.append((_("longest wait"), lambda result: words.span(Decimal(result.longest_wait) / MICROSECONDS)))
    return [
        (title, "" if saved_result is None else text_of(saved_result), text_of(typed_result)) for title, text_of in rows
    ]


def _refused_keys(saved_result: ReplayResult | None, typed_result: ReplayResult) -> set[str]:
    """Return the keys with requests that a rule would have refused, or that were refused at the time."""
    return {*typed_result.refused, *typed_result.admitted_now, *(() if saved_result is None else saved_result.refused)}


def _keys(saved_result: ReplayResult | None, typed_result: ReplayResult) -> list[ComparedKey]:
    """Return at most `TOP` keys of `_refused_keys`. Keys with the most newly refused requests come first."""

    def order(key: str) -> tuple[int, int, int, str]:
        newly_refused = typed_result.refused[key] - typed_result.refused_too[key]
        return -newly_refused, -typed_result.refused[key], -typed_result.admitted_now[key], key

    keys = sorted(_refused_keys(saved_result, typed_result), key=order)
    return [
        ComparedKey(
            key=key,
            requests=number(max(result.requests[key] for result in (typed_result, saved_result) if result is not None)),
            refused_by_typed=number(typed_result.refused[key]),
            refused_too=number(typed_result.refused_too[key]),
            newly_refused=number(typed_result.refused[key] - typed_result.refused_too[key]),
            admitted_now=number(typed_result.admitted_now[key]),
            refused_by_saved=number(saved_result.refused[key]) if saved_result is not None else "",
        )
        for key in keys[:TOP]
    ]


def _modes(typed: Rule, saved: Rule | None) -> Iterator[str]:
    if typed.mode != Rule.Mode.ENFORCE:
        yield _("The typed rule is not enforced. It would refuse these requests only if its mode were enforce.")
    if saved is not None and saved.mode != Rule.Mode.ENFORCE:
        yield _("The saved rule is not enforced, so it has refused nobody.")


def _notes(typed: Rule, trace: Trace) -> Iterator[str]:
    """Yield sentences that the user needs to understand the numbers."""
    if trace.more:
        yield _("Only the newest %s recorded requests were replayed.") % f"{MAX_REQUESTS:,}"
    elif trace.rows[-1].at - trace.rows[0].at < _WHOLE_DAY:
        yield _("The rest of the last 24 hours has no recorded requests that the rule could count.")
    yield _(
        "Each key begins with all permits. Plans, overrides, blocks and allows apply as they are now. Only this rule is"
        " replayed: another rule may refuse some of these requests too."
    )
    if typed.key_kind == KeyKind.VIEW_KEY:
        yield _("The keys that views give are not recorded, so no request was replayed.")
    if not conf.RECORD_SAMPLE:
        yield _("The recorder is off now. These requests were recorded before.")
    elif conf.RECORD_SAMPLE < 1:
        share = f"{number(Decimal(str(conf.RECORD_SAMPLE)) * 100)} %"
        yield _(
            "At present, %(share)s of the accounts, and of the keys without an account, are recorded completely."
        ) % {"share": share}
        if typed.key_kind in (KeyKind.IP, KeyKind.GLOBAL):
            yield _("This rule also counts requests that are not recorded, so it could have refused more requests.")
    if trace.left_out:
        yield ngettext(
            "%(n)s more request of this time could not be recorded.",
            "%(n)s more requests of this time could not be recorded.",
            trace.left_out,
        ) % {"n": f"{trace.left_out:,}"}
