"""The view of `/usage/`: usage and remaining quota; and what all views of the API need: their throttle and parameters.

Customers see only their own account. Staff see all accounts, if they have the permission. Requests to these views are
not billed, so the throttle counts no usage.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from time import perf_counter_ns
from typing import Any

from django.utils.translation import gettext as _
from rest_framework.exceptions import PermissionDenied, ValidationError
from rest_framework.permissions import IsAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.throttling import BaseThrottle
from rest_framework.utils.urls import replace_query_param
from rest_framework.views import APIView

from ratelimits import rules
from ratelimits.algorithms import calendar
from ratelimits.algorithms.base import HORIZON
from ratelimits.answers import observing
from ratelimits.answers.answer import Answer
from ratelimits.conf import conf
from ratelimits.engine.call import Op
from ratelimits.engine.keys import ledger_name
from ratelimits.identity import Identity, identify
from ratelimits.logs import bounded
from ratelimits.models.accounts.named import NamedCustomer, named_now
from ratelimits.models.customers import NameSpan, is_waiting
from ratelimits.models.keys import canonical_account, spelled_key
from ratelimits.moments import moment
from ratelimits.quota import finishing, without_decision
from ratelimits.quota.from_memory import by_row
from ratelimits.quota.prepared import commands_by
from ratelimits.quota.standings import UNAVAILABLE, Choice, run_uncounted, standings
from ratelimits.rules import AppliedRule, Selection, Snapshot
from ratelimits.signals import request_refused
from ratelimits.throttling import QuotaBlocked, QuotaUnavailable
from ratelimits.throttling.view_responses import add_fields
from ratelimits.usage.api import windows
from ratelimits.usage.api.serializers import Query, UsageQuery, cursor, max_span, span_error
from ratelimits.usage.api.windows import DAY, WindowQuery
from ratelimits.usage.customers import known_text
from ratelimits.usage.ledger.terms import MeterUse, Terms, TermsBook, present_usage
from ratelimits.usage.ledger.watermark import complete_until
from ratelimits.usage.periods import SECOND

# Projects can configure this name, which is older than the throttle's place in this module.
logger = bounded("ratelimits.usage.api.throttle")

#: The answer if there is no decision, and a failure policy refuses the request.
_UNAVAILABLE = Answer(False, retry_after=None, unavailable=True)


class _DecidedWithoutRedis(Exception):
    """Raised if a block, an allow or a failure policy has decided the request, so that Redis is not asked."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer


def _rules_of_scope(scope: str, method: str) -> Choice:
    """Return a function that chooses the rules with exactly this scope.

    The function does not choose rules with the scope "*", because these rules limit billable usage.
    """

    def choose(snapshot: Snapshot, identity: Identity) -> list[Selection]:
        answer = by_row(commands_by(snapshot), identity)
        if answer is not None:
            raise _DecidedWithoutRedis(answer)
        selection = snapshot.select(scope, method, identity)
        if selection.version not in (None, snapshot.version):
            # The rows about the key are newer than the snapshot. Perhaps a newer row is a block, so choose again.
            return choose(rules.current(), identity)
        rows = snapshot.rows.rules
        # A rule with wrong values cannot decide. So its failure policy decides.
        if any(rule.refuses and rows[rule.rule].scope == scope for rule in selection.unreadable):
            raise _DecidedWithoutRedis(_UNAVAILABLE)
        rules_of_scope = (rule for rule in selection.rules if rule.rule in rows and rows[rule.rule].scope == scope)
        return [replace(selection, rules=tuple(rules_of_scope))]

    return choose


class UnbilledThrottle(BaseThrottle):
    """A throttle of Django REST framework. It applies the rules of the view's `throttle_scope`, but counts no usage."""

    def __init__(self) -> None:
        self._retry_after: float | None = 0.0

    def allow_request(self, request: Request, view: APIView) -> bool:
        if not conf.ENABLED:
            return True
        scope, identity = getattr(view, "throttle_scope", None) or "", identify(request)
        started = perf_counter_ns()
        answer = _answer(identity, _rules_of_scope(scope, request.method or ""))
        if answer is None:
            return True
        if observing.observers:
            observing.observe(answer, scope, started, perf_counter_ns())
        if not answer.allowed and request_refused.receivers:
            observing.refused(answer, identity, scope, request.method or "")
        add_fields(request, view, answer.headers())
        if answer.unavailable:
            raise QuotaUnavailable
        finishing.begin(getattr(request, "_request", request), answer)
        if answer.access is not None and not answer.allowed:
            raise QuotaBlocked(answer.access)
        self._retry_after = answer.retry_after
        return answer.allowed

    def wait(self) -> float | None:
        """Return the seconds until the same request would be admitted; None if it can never be admitted."""
        return self._retry_after


def _answer(identity: Identity, choose: Choice) -> Answer | None:
    """Return the answer to a request; None if no rule, block or allow applies to it."""
    try:
        prepared, decision = run_uncounted(identity, choose, Op.TRY)
    except _DecidedWithoutRedis as decided:
        return decided.answer
    except UNAVAILABLE as error:
        logger.error("Redis made no decision, so FAILURE_POLICY decides: %s", error)
        return _UNAVAILABLE if conf.FAILURE_POLICY == "deny" else Answer(True)
    if decision is None:
        return None
    answer = Answer(decision.allowed, decision, prepared, decision.retry_after)
    if answer.allowed and prepared.left_out:
        costs = {meter.name: 1 for meter in prepared.meters}
        with without_decision.held(prepared, identity, costs) as held:
            held.admitted = held.refusal is None
        if held.refusal is not None:
            finishing.give_back(answer)
            return held.refusal
    return answer


class UsageView(APIView):
    """Return usage by windows of time, and the remaining quota.

    Customers see their own usage: that of all accounts that name the customer, each while it names the customer. Staff
    who may view ledger lines see the usage of all accounts, or of the customer that `account` names: by an account that
    it has now, or by its token. Like bills, the numbers come from the ledger. The ledger does not have the usage of
    about the last minute yet.
    """

    permission_classes = [IsAuthenticated]
    throttle_classes = [UnbilledThrottle]
    throttle_scope = "usage"

    def get(self, request: Request) -> Response:
        parameters, now = parameters_of(request, UsageQuery), time.time_ns() // 1000
        identity = wanted_identity(request, parameters, "ratelimits_usage.view_line")
        account = identity.account_id
        customer = named_now(conf.DATABASE, [account])[account] if account else None
        terms = Terms() if customer is None else TermsBook(conf.DATABASE).of_customers([customer])[customer.token]
        spans = None if customer is None else customer.names
        query = _window_query(parameters, spans, terms, now)
        rows, last = windows.rows(conf.DATABASE, query, parameters.get("cursor"), parameters["page_size"])
        is_first_page = "cursor" not in parameters
        return Response(
            {
                "account": account or None,
                "window": query.window,
                "timezone": query.timezone,
                "from": moment(query.start),
                "to": moment(query.end),
                "complete_until": _complete_until({span.text for span in spans or ()} or {account}),
                "quota": _quota(identity, customer, terms, now) if customer and is_first_page else None,
                "next": _next_link(request, query, cursor(last)) if last is not None else None,
                "results": [{**row, "unit": _unit(row["meter"])} for row in rows],
            }
        )


def parameters_of(request: Request, serializer_class: type[Query]) -> dict[str, Any]:
    """Return the validated query parameters.

    Raise ValidationError if a parameter has a wrong value, is not known, or is given more than once.
    """
    params = request.query_params
    repeated = [name for name in params if len(params.getlist(name)) > 1]
    if repeated:
        raise ValidationError(dict.fromkeys(repeated, _("This parameter is given more than once.")))
    # Give the serializer a dict: with a QueryDict, the serializer would ignore parameters with an empty value.
    serializer = serializer_class(data=params.dict())
    serializer.is_valid(raise_exception=True)
    parameters: dict[str, Any] = serializer.validated_data
    return parameters


def wanted_identity(request: Request, parameters: dict[str, Any], permission: str) -> Identity:
    """Return the identity whose usage the caller wants. An identity without an account stands for all accounts.

    Staff can also name a customer by its token. If staff name an account and a key, the identity has the key too:
    `_quota` then shows the limits of the key.

    Raise PermissionDenied for staff without the permission, and for a customer who has no account or names another
    account.
    """
    account: str | None = canonical_account(parameters["account"]) if "account" in parameters else None
    if request.user.is_staff:
        if not request.user.has_perm(permission):
            raise PermissionDenied(_("Staff need the permission %(permission)s.") % {"permission": permission})
        account = _text_of(account) if account else None
        key = spelled_key(parameters.get("key", ""))
        return Identity(
            account=f"account:{account}" if account else None,
            user=key if account and key.startswith("user:") else None,
            api_key=key if account and key.startswith("api_key:") else None,
        )
    caller = identify(request)
    if not caller.account_id:
        raise PermissionDenied(_("Your requests do not belong to an account."))
    if account is not None and account != caller.account_id:
        raise PermissionDenied(_("This is not your account."))
    return caller


def _text_of(account: str) -> str:
    """Return the account text of the customer that staff have named by its token; any other text as it is.

    If the customer has no text any more, return the text that stands for it (see `waiting_text`).
    """
    known = known_text(conf.DATABASE, account)
    if known is None or not is_waiting(known):
        return account
    return named_now(conf.DATABASE, [known])[known].present[0]


def _window_query(parameters: dict[str, Any], spans: Sequence[NameSpan] | None, terms: Terms, now: int) -> WindowQuery:
    """Return the query of the ledger for these parameters. `now` is in µs since 1970 UTC.

    Raise ValidationError if the span of time is empty, too long or out of range.
    """
    window: str = parameters["window"]
    timezone: str = parameters.get("timezone", terms.timezone)
    if "from" in parameters:
        start = _instant("from", parameters["from"], timezone)
    elif spans is None and window == "period":
        # A billing period has at most 31 days. Below, this moment is rounded down to the start of its month in UTC.
        start = now - 31 * DAY * SECOND
    else:
        start = terms.period(now).start
    end = _instant("to", parameters["to"], timezone) if "to" in parameters else now
    if end <= start:
        raise ValidationError({"to": _("This must be after `from`.")})
    if moment(end) - moment(start) > max_span(window):
        raise span_error(window)
    try:
        first_start, _first_end = windows.edges(window, timezone, terms, start)
        _last_start, last_end = windows.edges(window, timezone, terms, end - 1)
    except ValueError as error:
        raise ValidationError({"from": str(error)}) from error
    key = parameters.get("key")
    return WindowQuery(
        window=window,
        start=first_start,
        end=last_end,
        timezone=timezone,
        terms=terms,
        spans=spans,
        key=ledger_name(spelled_key(key)) if key is not None else None,
        meter=parameters.get("meter"),
    )


def _instant(name: str, value: datetime, timezone: str) -> int:
    """Return the value of the parameter `name` in µs since 1970 UTC. Without a UTC offset, it is a time in `timezone`.

    Raise ValidationError if the year is not supported.
    """
    try:
        micros = calendar.instant(value if value.tzinfo is not None else value.replace(tzinfo=calendar.zone(timezone)))
    except OverflowError as error:
        raise ValidationError({name: _("This year is not supported.")}) from error
    if not 0 <= micros < HORIZON:
        raise ValidationError({name: _("This year is not supported.")})
    return micros


def _complete_until(accounts: Iterable[str]) -> datetime | None:
    """Return the moment until which the ledger is complete for all these accounts; "" stands for every account."""
    until = min(complete_until(conf.DATABASE, account) or 0 for account in accounts)
    return moment(until) if until else None


def _quota(identity: Identity, customer: NamedCustomer, terms: Terms, now: int) -> dict[str, Any]:
    period, meters = present_usage(conf.DATABASE, customer, terms, now)
    return {
        "period_start": moment(period.start),
        "period_end": moment(period.end),
        "plan": terms.plan,
        "included": [_included(use) for use in meters],
        "limits": _limits(identity),
    }


def _included(use: MeterUse) -> dict[str, Any]:
    return {
        "meter": use.meter,
        "unit": _unit(use.meter),
        "used": use.used,
        "included": use.included,
        "remaining": use.remaining,
        "overage": use.overage,
    }


def _limits(identity: Identity) -> list[dict[str, Any]] | None:
    try:
        limits = standings(identity)
    except UNAVAILABLE:
        return None
    return [
        {
            "rule": rule.name,
            "key": key,
            "meter": rule.meter,
            "unit": _unit(rule.meter),
            "limit": _permits(rule),
            "remaining": standing.remaining,
            "reset_after": standing.reset_after,
        }
        for rule, key, standing in limits
    ]


def _permits(rule: AppliedRule) -> int:
    permits, _micros = rule.algorithm.quota
    return permits


def _unit(meter: str) -> str:
    return conf.UNITS.get(meter) or meter


def _next_link(request: Request, query: WindowQuery, cursor_text: str) -> str:
    """Return the link to the next page. The link has the moments `from` and `to`, so all pages have the same span."""
    url = request.build_absolute_uri()
    for name, at in (("from", query.start), ("to", query.end)):
        url = replace_query_param(url, name, moment(at).isoformat().replace("+00:00", "Z"))
    return replace_query_param(url, "cursor", cursor_text)
