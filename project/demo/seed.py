"""Write the rows for the demo: plans, rules, a staff user and, for each run, accounts and API keys."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from django.contrib.auth import get_user_model
from django.db import transaction

from project.demo.opening import STAFF
from project.models import ApiKey
from ratelimits import engine
from ratelimits.algorithms.limits import FixedWindow
from ratelimits.billing.models import PlanPrice, Report
from ratelimits.billing.reports.closing.close import finalise
from ratelimits.conf import conf
from ratelimits.models import Account, Plan, PlanInclusion, PlanMembership, Rule
from ratelimits.models.versions import editing
from ratelimits.usage.ledger.drain import drain
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.ledger.tally import tally

#: The customer with a finished month.
FINISHED = "initech"
#: How many requests this customer made on each day of that month.
_REQUESTS_A_DAY = 2_500


@dataclass(frozen=True)
class IssuedKey:
    """A new API key with its secret, which only the owner gets.

    key      the name of the API key in limits, such as "api_key:7"
    account  the identifier of the account
    plan     the slug of the plan
    """

    name: str
    key: str
    secret: str
    account: str
    plan: str


def seed_staff(password: str) -> None:
    """Make the staff user with this password."""
    user, _ = get_user_model().objects.get_or_create(username=STAFF, defaults={"is_staff": True, "is_superuser": True})
    user.set_password(password)
    user.save()


@transaction.atomic
def seed_rules() -> None:
    """Make two plans, their rules and the default rules. Rows that exist stay: staff may have edited them."""
    free, _ = Plan.objects.get_or_create(slug="free", defaults={"name": "Free"})
    pro, _ = Plan.objects.get_or_create(slug="pro", defaults={"name": "Pro"})
    for included, meter, quantity in (
        (free, "requests", 500),
        (free, "tokens", 5_000),
        (pro, "requests", 50_000),
        (pro, "tokens", 1_000_000),
    ):
        PlanInclusion.objects.get_or_create(plan=included, meter=meter, defaults={"quantity": quantity})
    bucket = {"algorithm": "token_bucket", "period": 1}
    window = {"algorithm": "fixed_window", "period": 60}
    rules: tuple[tuple[str, Plan | None, dict[str, Any]], ...] = (
        # Rules that bill. Their limits are high enough for every plan.
        ("requests", None, {**window, "key_kind": "api_key", "capacity": 100_000, "bills": True}),
        (
            "tokens",
            None,
            {**window, "key_kind": "api_key", "meter": "tokens", "capacity": 500_000, "bills": True},
        ),
        ("everyone", None, {**window, "key_kind": "global", "capacity": 1_000_000}),
        ("account", None, {**window, "key_kind": "account", "capacity": 2_500}),
        (
            "daily",
            None,
            {"algorithm": "calendar_window", "calendar_unit": "day", "key_kind": "account", "capacity": 1_000_000},
        ),
        ("burst", free, {**bucket, "key_kind": "api_key", "capacity": 20, "rate": 10}),
        ("burst", pro, {**bucket, "key_kind": "api_key", "capacity": 200, "rate": 80}),
        ("text", free, {**bucket, "key_kind": "api_key", "meter": "tokens", "capacity": 200, "rate": 50}),
    )
    for name, plan, fields in rules:
        Rule.objects.get_or_create(name=name, plan=plan, defaults=fields)


def seed_finished_month() -> None:
    """Make a customer whose last month is over: with usage, prices and a final report. A second call does nothing."""
    if Report.objects.filter(account=FINISHED).exists():
        return
    this_month = datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    first_day = (this_month - timedelta(days=1)).replace(day=1)
    # The plan, its prices and the account are older than the month, so that they count in it.
    with editing(conf.DATABASE, since=_microseconds(first_day)):
        plan = Plan.objects.create(slug="team", name="Team")
        PlanInclusion.objects.create(plan=plan, meter="requests", quantity=50_000)
        PlanPrice.objects.create(plan=plan, meter="requests", unit_price=Decimal("0.002"), flat_fee=Decimal(49))
        Account.objects.create(identifier=FINISHED, name="Initech", plan=plan)
    rule = Rule.objects.get(name="requests", plan=None)
    usage = engine.Usage(FINISHED, f"account:{FINISHED}", (engine.Meter("requests", rule.pk, rule.version),))
    wide = FixedWindow(capacity=_REQUESTS_A_DAY, period=Decimal(1))
    for day in range((this_month - first_day).days):
        limit = engine.Limit(key=f"account:{FINISHED}", algorithm=wide, cost=_REQUESTS_A_DAY)
        noon = _microseconds(first_day + timedelta(days=day, hours=12))
        engine.decide([limit], account=FINISHED, usage=usage, now=noon)
    seal()
    drain()
    tally()
    finalise(account=FINISHED)


def _microseconds(moment: datetime) -> int:
    return int(moment.timestamp()) * 1_000_000


@transaction.atomic
def seed_keys() -> list[IssuedKey]:
    """Make two new accounts and five API keys for this run. So the counts of earlier runs belong to other accounts."""
    run = secrets.token_hex(2)
    plans = {plan.slug: plan for plan in Plan.objects.filter(slug__in=("free", "pro"))}
    issued = []
    for company, slug, names in (("acme", "pro", ("web", "mobile", "batch")), ("globex", "free", ("web", "trial"))):
        identifier = f"{company}-{run}"
        Account.objects.create(identifier=identifier, name=company.title(), plan=plans[slug])
        user = get_user_model().objects.create_user(username=identifier)
        for name in names:
            key, secret = ApiKey.objects.issue(name=f"{company} {name}", user=user, account=identifier)
            issued.append(IssuedKey(key.name, key.limit_key, secret, identifier, slug))
    # The plan of one API key differs from the plan of its account.
    trial = next(key for key in issued if key.name == "globex trial")
    PlanMembership.objects.create(key=trial.key, plan=plans["pro"])
    return [replace(key, plan="pro") if key is trial else key for key in issued]
