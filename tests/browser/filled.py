"""A site with something on every page: customers, rules, a month of usage, refusals, a report, blocks and edits."""

from __future__ import annotations

import time
from datetime import timedelta
from decimal import Decimal
from typing import Any, NamedTuple

from django.contrib.auth.models import User
from django.db.models import QuerySet
from django.utils import timezone

from project.models import ApiKey
from ratelimits import engine
from ratelimits.algorithms.limits import Limit, TokenBucket
from ratelimits.billing import tasks as billing_tasks
from ratelimits.billing.models import PlanPrice, Report
from ratelimits.identity import Identity
from ratelimits.models import Access, Account, ConfigVersion, KeyOverride, Plan, PlanInclusion, PlanMembership, Rule
from ratelimits.models.history import because
from ratelimits.quota import checking
from ratelimits.status.operating import reset
from ratelimits.usage import tasks
from ratelimits.usage.models import QuarantinedBatch
from tests.support.rows import rule

#: Numbers of µs.
_MINUTE = 60_000_000
_DAY = 1440 * _MINUTE


class Filled(NamedTuple):
    """What the addresses of pages name.

    user    a user who may do everything
    key     an API key that is refused
    rule    id of an enforced rule
    shadow  id of a rule in shadow mode
    report  id of a report
    """

    user: User
    key: str
    rule: int
    shadow: int
    report: int


def fill() -> Filled:
    """Make everything."""
    user = User.objects.create(username="ada", is_staff=True, is_superuser=True)
    acme = _customer("acme", "Acme Ltd.", "Pro", included=50_000, unit_price="0.002")
    globex = _customer("globex", "Globex", "Free", included=500)
    web, mobile, trial = (
        _api_key(name, payer) for name, payer in (("acme web", acme), ("acme mobile", acme), ("globex trial", globex))
    )
    requests, burst, search = _rules(acme)
    for day in range(1, 70, 3):
        _usage([(web, "acme"), (trial, "globex")], requests, burst, now=_now() - day * _DAY, times=20 + day % 7)
    for step in range(96):
        keys = [(web, "acme")] if step % 3 else [(web, "acme"), (mobile, "acme"), (trial, "globex")]
        now = _now() - (96 - step) * 15 * _MINUTE
        _usage(keys, requests, burst, now=now, times=6 + abs(step % 24 - 12))
    for key, account in (*[(web, "acme")] * 9, *[(trial, "globex")] * 7):
        checking.check(Identity(api_key=key, account=f"account:{account}"))
    tasks.seal()
    tasks.drain()
    billing_tasks.finalise()
    # Usage that arrives later than the closing: a complete period that is still open.
    _usage([("api_key:99", "initech")], requests, burst, now=_now() - 40 * _DAY, times=30)
    tasks.seal()
    tasks.drain()
    _edits(user, web, mobile)
    reset(web, "hourly", "asked by phone", account="acme", by=user)
    for _request in range(4):
        checking.check(Identity(api_key=mobile, account="account:acme"), "search")
    report = Report.objects.filter(account="acme").latest("period_start")
    return Filled(user, mobile, burst.pk, search.pk, report.pk)


def _now() -> int:
    return int(time.time() * 1_000_000)


def _customer(identifier: str, name: str, plan: str, included: int, unit_price: str = "") -> Account:
    """Make an account, since the past, on its own plan."""
    made = Plan.objects.create(name=plan, slug=plan.lower(), currency="EUR" if unit_price else "")
    PlanInclusion.objects.create(plan=made, meter="requests", quantity=included)
    if unit_price:
        PlanPrice.objects.create(plan=made, meter="requests", unit_price=Decimal(unit_price))
    account = Account.objects.create(identifier=identifier, name=name, plan=made)
    for model in (Account, Plan, PlanInclusion, PlanPrice):
        QuerySet(model).update(since=0)
        model.history.update(since=0)
    return account


def _api_key(name: str, account: Account) -> str:
    user, _made = User.objects.get_or_create(username=account.identifier)
    return ApiKey.objects.issue(name=name, user=user, account=account.identifier)[0].limit_key


def _rules(acme: Account) -> tuple[Rule, Rule, Rule]:
    requests = rule("requests", "fixed_window", capacity=100_000, period=60, key_kind="api_key", bills=True)
    burst = rule("burst", "token_bucket", capacity=10, rate=5, period=1, key_kind="api_key")
    rule("burst", "token_bucket", capacity=200, rate=80, period=1, key_kind="api_key", plan=acme.plan)
    rule("monthly", "calendar_window", capacity=100_000, calendar_unit="month", key_kind="account")
    rule(
        "hourly", "fixed_window", capacity=3, period=3600, window_start="first_hit", key_kind="api_key", scope="search"
    )
    search = rule("search", "sliding_window", capacity=4, period=60, key_kind="api_key", mode="shadow")
    return requests, burst, search


def _usage(keys: list[tuple[str, str]], billing: Rule, limiting: Rule, *, now: int, times: int) -> None:
    """Make requests at one moment, of which the limiting rule refuses a quarter."""
    version = ConfigVersion.read("default")[0]
    size = TokenBucket(capacity=times * 3 // 4, rate=Decimal(1), period=Decimal(3600))
    for key, account in keys:
        meter = engine.Meter("requests", billing.pk, billing.version)
        usage = engine.Usage(account, key, (meter,))
        limit = Limit(key, size, f"{limiting.name}{now}", rule=limiting.pk, version=version)
        for _request in range(times):
            engine.decide([limit], account=account, usage=usage, now=now)


def _edits(user: User, web: str, mobile: str) -> None:
    """Make rows that people make, with a history."""
    until = timezone.now() + timedelta(days=7)
    monthly = Rule.objects.get(name="monthly")
    monthly.capacity = 250_000
    pro = Plan.objects.get(slug="pro")
    _save(user, "OPS-17: sale of November", monthly)
    _save(user, "OPS-17", KeyOverride(key=web, rule="burst", capacity=400, valid_until=until, reason="sale"))
    _save(user, "", PlanMembership(key=mobile, plan=pro))
    for row in (
        Access(target="ip:203.0.113.0/24", reason="a scan of our login", valid_until=until),
        Access(target="ip:2001:db8::/32", effect="allow", reason="our office"),
        Access(target="user:66", reason="abuse", status=429, message="Write to support."),
    ):
        _save(user, row.reason, row)
    QuarantinedBatch.objects.create(shard=1, name="3f9c:1", content="1", reason="its digest is wrong")


def _save(user: User, reason: str, row: Any) -> None:
    """Save a row as if the user had done it."""
    row._history_user = user
    with because(reason):
        row.save()
