"""The page that tries a typed rule, or a short limit, on the recorded requests of 24 hours. Nothing is saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any, NamedTuple
from urllib.parse import urlencode

from django import forms
from django.core.exceptions import PermissionDenied, ValidationError
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ratelimits.admin.inspected import inspect_url, may_inspect
from ratelimits.admin.rule_form.forms import scopes_of_views
from ratelimits.admin.rule_form.rule_text import rule_text
from ratelimits.admin.rule_form.rules import RuleAdmin
from ratelimits.admin.rule_form.typed_forms import SuggestingInput
from ratelimits.algorithms import typed_rates
from ratelimits.algorithms.base import MICROSECONDS, Wording, amount, number
from ratelimits.algorithms.typed_numbers import Mistyped
from ratelimits.conf import conf
from ratelimits.models import Rule
from ratelimits.models.fields.numbers import mistyped, notation
from ratelimits.models.fields.scopes import split_scope
from ratelimits.models.keys import KeyKind
from ratelimits.moments import moment
from ratelimits.quota.standings import UNAVAILABLE
from ratelimits.status.keys import searched_name
from ratelimits.usage.admin.recorded import LOOK_BACK, MAX_REQUESTS, ReplayResult, recorded_day, replay_result
from ratelimits.usage.recording import Trace, scopes_since

#: Number of keys that are listed.
TOP = 20
#: Maximum number of scopes that a sentence names.
_MAX_SCOPES = 20
#: If the recorded requests cover less time than this (µs), the page says so.
_WHOLE_DAY = 23 * 3_600 * MICROSECONDS


#: The rule has these values. The form does not ask for them.
_FIXED_VALUES = {"name": "tried", "meter": "requests", "mode": "enforce", "algorithm": "sliding_window"}


class QuickTryForm(forms.Form):
    """A form that asks for a limit such as "50 a minute", for the kind of key, and for the scope."""

    required_css_class = "required"
    limit = forms.CharField(
        label=gettext_lazy("Limit"),
        max_length=60,
        help_text=gettext_lazy("Such as 50 a minute, 50/m, 1000/h or 10/5min."),
    )
    key_kind = forms.ChoiceField(label=gettext_lazy("Counted per"), choices=KeyKind.choices, initial=KeyKind.CALLER)
    scope = forms.CharField(
        label=gettext_lazy("Scope"),
        max_length=255,
        initial="*",
        widget=SuggestingInput(scopes_of_views),
        help_text=gettext_lazy("* stands for all requests."),
    )

    def clean_limit(self) -> str:
        """Return the typed limit. Refuse a number without a time, and a text that is not a limit."""
        limit = str(self.cleaned_data["limit"])
        try:
            typed_rates.rate(limit, notation())
        except Mistyped as error:
            if error.is_ambiguous:
                raise mistyped(error) from error
            hint = _(
                "Write a number and a time: 50/s, 50/m, 50/h, 50/d, 50/week, 50/5min or 50 a minute. Months have no"
                " fixed length: write days, such as 1000/30d."
            )
            raise ValidationError(hint) from error
        return limit

    def rule_values(self) -> dict[str, Any]:
        """Return the values for the form of a rule that counts in a sliding window.

        `capacity` gets the whole limit, such as "50/m". The form of a rule splits it into a capacity and a period.
        """
        data = self.cleaned_data
        return {**_FIXED_VALUES, "capacity": data["limit"], "key_kind": data["key_kind"], "scope": data["scope"]}

    @staticmethod
    def rule_query(rule: Any) -> str:
        """Return a query string for the page that adds a rule. The form then has the values of the tried rule."""
        values = {name: getattr(rule, name) for name in ("scope", "key_kind", "meter", "algorithm", "capacity")}
        return f"?{urlencode({**values, 'period': f'{rule.period.normalize():f}'})}"


def yesterday_page(page: RuleAdmin, request: HttpRequest) -> HttpResponse:
    """Return a page that shows what the typed rule would have decided about the requests of the last 24 hours.

    Only recorded requests are known. Without a typed rule, the page asks for a limit.
    """
    short_form = None if request.POST else QuickTryForm(request.GET if "limit" in request.GET else None)
    context: dict[str, Any] = {"short_form": short_form}
    rule = None
    if short_form is None or short_form.is_valid():
        form = page.tried_form(request, None if short_form is None else short_form.rule_values())
        rule, errors = form.typed_rule()
        context["errors"] = form.errors_with_labels(errors)
    elif not page.may_try(request):
        raise PermissionDenied
    if rule is not None:
        context |= _yesterday_of(page, request, rule)
        if short_form is not None and page.has_add_permission(request):
            add = reverse(f"{page.admin_site.name}:ratelimits_rule_add")
            context["add_url"] = add + short_form.rule_query(rule)
    title = _("Would a limit have refused anyone in the last 24 hours?")
    context |= {**page.admin_site.each_context(request), "title": title}
    if rule is not None and short_form is not None:
        rule.name = ""  # The name is from the short form. The user has not typed it.
    context |= {"opts": page.model._meta, "rule_text": rule and rule_text(rule)}
    return TemplateResponse(request, "ratelimits/admin/rule_yesterday.html", context)


def _yesterday_of(page: RuleAdmin, request: HttpRequest, rule: Rule) -> dict[str, Any]:
    saved = page.get_queryset(request).filter(pk=rule.pk).first()
    user: Any = request.user
    context = yesterday(rule, saved, with_keys=user.has_perm("ratelimits_usage.view_line"))
    has_links, site = may_inspect(request), page.admin_site.name
    context["keys"] = [
        (
            row,
            inspect_url(row.key, site=site) if has_links and ":" in row.key else "",
            searched_name(row.key) if has_links and row.key.startswith("api_key:") else "",
        )
        for row in context.get("keys", ())
    ]
    return context


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
