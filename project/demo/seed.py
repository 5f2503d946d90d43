"""Write the rows for the demo: plans, rules, a staff user and, for each run, accounts and API keys."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any

from django.contrib.auth import get_user_model
from django.db import transaction

from project.demo.opening import STAFF
from project.models import ApiKey
from ratelimits.models import Account, Plan, PlanInclusion, PlanMembership, Rule


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
        ("burst", free, {**bucket, "key_kind": "api_key", "capacity": 20, "rate": 10}),
        ("burst", pro, {**bucket, "key_kind": "api_key", "capacity": 200, "rate": 80}),
        ("text", free, {**bucket, "key_kind": "api_key", "meter": "tokens", "capacity": 200, "rate": 50}),
    )
    for name, plan, fields in rules:
        Rule.objects.get_or_create(name=name, plan=plan, defaults=fields)


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
