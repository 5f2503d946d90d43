"""`/usage/`: what an account has used and has left, and its reports; a customer's own, and for staff everyone's."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

from django.db.models import Min, Sum
from django.http import HttpResponseBase
from django.utils.translation import gettext as _
from rest_framework.exceptions import PermissionDenied, ValidationError
from rest_framework.permissions import IsAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.utils.urls import replace_query_param
from rest_framework.views import APIView

from ratelimits.algorithms import calendar
from ratelimits.api import windows
from ratelimits.api.serializers import Query, ReportQuery, UsageQuery, cursor, longest, too_long
from ratelimits.api.throttle import UnbilledThrottle
from ratelimits.api.windows import DAY, WindowQuery
from ratelimits.conf import conf
from ratelimits.engine.keys import ledger_name, shard_of
from ratelimits.identity import Identity, identify
from ratelimits.models import PeriodUsage, ShardState
from ratelimits.models.ledger import moment
from ratelimits.quota.standings import UNAVAILABLE, standings
from ratelimits.reports.exports.download import Download
from ratelimits.reports.periods import SECOND
from ratelimits.reports.statements import statements
from ratelimits.reports.statements.charges import lines_for
from ratelimits.reports.terms import Terms, TermsBook


class UsageView(APIView):
    """Usage by windows of time, and what is left of the quota.

    A customer sees the usage of its own account, staff that of all accounts, or of the one that `account` names. The
    numbers are those of the ledger, which bills are written from; usage of the last minute or so is not in it yet.
    """

    permission_classes = [IsAuthenticated]
    throttle_classes = [UnbilledThrottle]
    throttle_scope = "usage"

    def get(self, request: Request) -> Response:
        asked, now = _asked(request, UsageQuery), time.time_ns() // 1000
        who = _whose(request, asked)
        terms = TermsBook(conf.DATABASE).of([who.owner])[who.owner] if who.owner else Terms()
        question = _question(asked, who.owner or None, terms, now)
        found, last = windows.rows(conf.DATABASE, question, asked.get("cursor"), asked["page_size"])
        first = who.owner and "cursor" not in asked
        return Response(
            {
                "account": who.owner or None,
                "window": question.window,
                "timezone": question.timezone,
                "from": moment(question.start),
                "to": moment(question.end),
                "complete_until": _complete_until(who.owner),
                "quota": _quota(who, terms, now) if first else None,
                "next": _next(request, question, cursor(last)) if last is not None else None,
                "results": [{**row, "unit": _unit(row["meter"])} for row in found],
            }
        )


class ReportView(APIView):
    """The report of a month as a file.

    It has the billing periods that start in the month: finalised ones in their newest version, open ones provisionally.
    A customer gets its own account's, staff that of all accounts, or of the one that `account` names.
    """

    permission_classes = [IsAuthenticated]
    throttle_classes = [UnbilledThrottle]
    throttle_scope = "usage"

    def get(self, request: Request) -> HttpResponseBase:
        asked = _asked(request, ReportQuery)
        who, month = _whose(request, asked), asked["period"]
        account = who.owner or None
        form = asked["file"]
        return Download(form, lines_for(form, statements(month, account=account)), f"usage-{month}")


def _asked(request: Request, form: type[Query]) -> dict[str, Any]:
    given = request.query_params
    repeated = [name for name in given if len(given.getlist(name)) > 1]
    if repeated:
        raise ValidationError(dict.fromkeys(repeated, _("This is there more than once.")))
    # A plain dict: of a form, DRF would take an empty field for one that is not there.
    query = form(data=given.dict())
    query.is_valid(raise_exception=True)
    asked: dict[str, Any] = query.validated_data
    return asked


def _whose(request: Request, asked: dict[str, Any]) -> Identity:
    """Whose usage is asked for: the identity without an account is everyone, which only staff may ask for."""
    wanted: str | None = ledger_name(asked["account"]) if "account" in asked else None
    if request.user.is_staff:
        key: str = asked.get("key", "")
        return Identity(
            account=f"account:{wanted}" if wanted else None,
            user=key if wanted and key.startswith("user:") else None,
            api_key=key if wanted and key.startswith("api_key:") else None,
        )
    own = identify(request)
    if not own.owner:
        raise PermissionDenied(_("Your requests belong to no account."))
    if wanted is not None and wanted != own.owner:
        raise PermissionDenied(_("This is not your account."))
    return own


def _question(asked: dict[str, Any], account: str | None, terms: Terms, now: int) -> WindowQuery:
    window: str = asked["window"]
    timezone: str = asked.get("timezone", terms.timezone)
    if "from" in asked:
        start = _instant("from", asked["from"], timezone)
    elif account is None and window == "period":
        start = now - 31 * DAY * SECOND  # since then the current period of every account has begun
    else:
        start = terms.period(now).start
    end = _instant("to", asked["to"], timezone) if "to" in asked else now
    if end <= start:
        raise ValidationError({"to": _("This is not after `from`.")})
    if moment(end) - moment(start) > longest(window):
        raise too_long(window)
    try:
        first = windows.edges(window, timezone, terms, start)
        last = windows.edges(window, timezone, terms, end - 1)
    except ValueError as error:
        raise ValidationError({"from": str(error)}) from error
    key = asked.get("key")
    return WindowQuery(
        window,
        first[0],
        last[1],
        timezone,
        terms,
        account,
        ledger_name(key) if key is not None else None,
        asked.get("meter"),
    )


def _instant(name: str, at: datetime, timezone: str) -> int:
    """A moment in µs since 1970 UTC; one without an offset is one of the time zone."""
    try:
        micros = calendar.instant(at if at.tzinfo is not None else at.replace(tzinfo=calendar.zone(timezone)))
    except OverflowError as error:
        raise ValidationError({name: _("This lies outside the years that calendars know.")}) from error
    if not 0 <= micros < 2**52:
        raise ValidationError({name: _("This lies outside the years that calendars know.")})
    return micros


def _complete_until(account: str) -> datetime | None:
    shards = ShardState.objects.using(conf.DATABASE)
    if account:
        shards = shards.filter(shard=shard_of(f"account:{account}", conf.SHARDS))
    watermark = shards.aggregate(oldest=Min("watermark"))["oldest"]
    return moment(watermark) if watermark else None


def _quota(who: Identity, terms: Terms, now: int) -> dict[str, Any]:
    period = terms.period(now)
    rows = PeriodUsage.objects.using(conf.DATABASE).filter(account=who.owner, period=period.start // SECOND)
    sums = rows.values_list("meter").order_by().annotate(Sum("admitted_units"), Sum("refunded_units"))
    used = {meter: admitted - refunded for meter, admitted, refunded in sums}
    return {
        "period_start": moment(period.start),
        "period_end": moment(period.end),
        "plan": terms.plan,
        "included": [
            _included(meter, used.get(meter, 0), terms.included.get(meter, 0))
            for meter in sorted(used.keys() | terms.included.keys())
        ],
        "limits": _limits(who),
    }


def _included(meter: str, used: int, included: int) -> dict[str, Any]:
    left, over = max(included - used, 0), max(used - included, 0)
    unit = _unit(meter)
    return {"meter": meter, "unit": unit, "used": used, "included": included, "remaining": left, "overage": over}


def _limits(who: Identity) -> list[dict[str, Any]] | None:
    try:
        found = standings(who)
    except UNAVAILABLE:
        return None
    return [
        {
            "rule": rule.name,
            "key": key,
            "meter": rule.meter,
            "unit": _unit(rule.meter),
            "limit": rule.algorithm.quota[0],
            "remaining": standing.remaining,
            "reset_after": standing.reset_after,
        }
        for rule, key, standing in found
    ]


def _unit(meter: str) -> str:
    return conf.UNITS.get(meter) or meter


def _next(request: Request, question: WindowQuery, place: str) -> str:
    """The link to the next page: of the same span, whatever the time is then."""
    url = request.build_absolute_uri()
    for name, at in (("from", question.start), ("to", question.end)):
        url = replace_query_param(url, name, moment(at).isoformat().replace("+00:00", "Z"))
    return replace_query_param(url, "cursor", place)
