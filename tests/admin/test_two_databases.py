"""Test the admin with users, sessions and Django's log in one database, and the app's rows in another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fresh import Project
from tests.support.own_apps import OWN
from tests.support.servers import TestServers

_URLS = """
from django.contrib import admin

urlpatterns += [path("admin/", admin.site.urls)]
"""
#: Make both databases. One has the rules and no users, the other the users and no rules, so a wrong database is seen.
_MIGRATED = """
from django.core.management import call_command

for name in ("default", "quota"):
    call_command("migrate", verbosity=0, database=name)
call_command("check", databases=["quota"])
"""
_SIGNED_IN = """
import re
from datetime import UTC, datetime
from html import unescape

from django.contrib.admin import site
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.db.models import ProtectedError
from django.test import Client

from ratelimits.billing.models import *
from ratelimits.models import *
from ratelimits.usage.models import *
from ratelimits.models.customers import Customer, make_missing
from ratelimits.models.versions import ConfigVersion

ADMIN, BILLS = "/admin/ratelimits/", "/admin/ratelimits_billing/"
RULE = {"name": "burst", "scope": "*", "key_kind": "ip", "meter": "requests", "mode": "enforce",
        "algorithm": "fixed_window", "capacity": "2", "period": "3600", "on_failure": ""}


def signed_in(name):
    user = User.objects.create_superuser(name, password="secret")
    client = Client()
    assert client.login(username=name, password="secret")
    return user, client


ada, client = signed_in("ada")


def get(url, client=client):
    answer = client.get(url)
    assert answer.status_code == 200, (url, answer.status_code)
    return unescape(re.sub(r"\\s+", " ", re.sub(r"<[^>]+>", " ", answer.content.decode())))


def post(url, data, client=client):
    answer = client.post(url, data)
    assert answer.status_code == 302 and "/login/" not in answer.url, (url, answer.context and answer.context["errors"])


def statuses(times, address):
    return [Client(REMOTE_ADDR=address).get("/hello/").status_code for _time in range(times)]
"""
_EDITS = """
assert statuses(3, "192.0.2.1") == [200] * 3
post(ADMIN + "rule/add/", RULE)
rule = Rule.objects.get()
assert statuses(3, "192.0.2.2") == [200, 200, 429]
post(f"{ADMIN}rule/{rule.pk}/change/", {**RULE, "capacity": "5"})
assert statuses(6, "192.0.2.3") == [200] * 5 + [429]

bob, bobs = signed_in("bob")
post(f"{ADMIN}rule/{rule.pk}/change/", {**RULE, "capacity": "6"}, bobs)
first, second, third = rule.history.order_by("pk")
assert (first.history_user, third.history_user) == (ada, bob)
assert {record._state.db for record in (first, rule)} == {"quota"} and first.history_user._state.db == "default"
page = get(f"{ADMIN}rule/{rule.pk}/history/")
assert page.count(" ada ") >= 2 and page.count(" bob ") == 1, page
post(f"{ADMIN}rule/{rule.pk}/history/{first.pk}/", RULE)
assert Rule.objects.get().capacity == 2 and rule.history.first().history_user == ada

post(ADMIN + "plan/add/", {"name": "Pro", "slug": "pro", "inclusions-TOTAL_FORMS": "1", "inclusions-INITIAL_FORMS": "0",
                           "inclusions-0-meter": "requests", "inclusions-0-quantity": "5",
                           "prices-TOTAL_FORMS": "0", "prices-INITIAL_FORMS": "0"})
plan = Plan.objects.get()
post(ADMIN + "account/add/", {"identifier": "acme", "name": "Acme", "timezone": "UTC", "plan": plan.pk})
post(ADMIN + "planmembership/add/", {"key": "user:7", "plan": plan.pk})
post(ADMIN + "keyoverride/add/", {"key": "ip:192.0.2.1", "rule": "burst", "capacity": "3", "mode": ""})
post(ADMIN + "rule/", {"action": "shadow", "_selected_action": [rule.pk]})
assert statuses(9, "192.0.2.4") == [200] * 9
assert ConfigVersion.read("quota")[0] == 9, ConfigVersion.read("quota")
for model in (Rule, Plan, PlanInclusion, Account, PlanMembership, KeyOverride):
    assert {record.history_user for record in model.history.all()} <= {ada, bob}, model
    assert model.history.exists() and not model.history.filter(history_user=None).exists(), model
assert LogEntry.objects.using("default").count() == 9, list(LogEntry.objects.all())
"""
_REPORTS = """
month = datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
start = int(month.timestamp()) * 1_000_000
end = start + 40 * 86_400_000_000
make_missing("quota", ["acme"])
report = Report.objects.create(
    customer=Customer.objects.get(names__identifier="acme"),
    account="acme", period_start=start, period_end=end, timezone="UTC", line_count=1,
)
numbers = {field.name: 1 for field in ReportLine._meta.fields if "Integer" in field.get_internal_type()}
line = ReportLine.objects.create(
    report=report, line_id="line", key="ip:192.0.2.1", meter="requests", rule="burst",
    **{**numbers, "rule_id": rule.pk, "rule_version": 3, "charge_period_start": start, "charge_period_end": end},
)
adjustment = {"account": "acme", "period_start_0": f"{month:%Y-%m-%d}", "period_start_1": "00:00:00",
              "meter": "requests", "quantity": "-2", "reason": "goodwill", "_effect_seen": "1", "_large_meant": "1"}
post(BILLS + "adjustment/add/", adjustment)
made = Adjustment.objects.get()
assert made.author == ada and made.author._state.db == "default"
assert " ada " in get(f"{BILLS}adjustment/{made.pk}/change/")
assert " ada, " in get(BILLS + "adjustment/").partition("goodwill")[2]
get(f"{BILLS}report/{report.pk}/change/")
page = get(f"{BILLS}reportline/{line.pk}/change/")
assert " UTC bob: rule" in page and " UTC ada: account" in page, page
for model in site._registry:
    if model._meta.app_label.startswith("ratelimits"):
        for order in ("", "?o=1", "?o=6", "?q=a"):
            get(f"/admin/{model._meta.app_label}/{model._meta.model_name}/{order}")
for row in (rule, plan, Account.objects.get(), PlanMembership.objects.get(), KeyOverride.objects.get()):
    page = get(f"/admin/{row._meta.app_label}/{row._meta.model_name}/{row.pk}/history/")
    assert " ada " in page.partition("Changed by")[2], page
    get(f"/admin/{row._meta.app_label}/{row._meta.model_name}/{row.pk}/change/")
    get(f"/admin/{row._meta.app_label}/{row._meta.model_name}/{row.pk}/delete/")
"""
_USERS_GO = """
cyd, cyds = signed_in("cyd")
page = get(f"/admin/auth/user/{ada.pk}/delete/", cyds)
assert "Cannot delete user" in page and page.rstrip().endswith("adjustment"), page
cyds.post(f"/admin/auth/user/{ada.pk}/delete/", {"post": "yes"})
try:
    User.objects.filter(username="ada").delete()
except ProtectedError as error:
    assert error.protected_objects == {made}
else:
    raise AssertionError("deleted")
assert User.objects.filter(username="ada").exists() and not rule.history.filter(history_user=None).exists()

post(f"/admin/auth/user/{bob.pk}/delete/", {"post": "yes"}, cyds)
assert not User.objects.filter(username="bob").exists()
assert rule.history.filter(history_user=None).count() == 1 and rule.history.filter(history_user=ada).count() == 4
page = get(f"{ADMIN}rule/{rule.pk}/history/")
assert " bob " not in page and " ada " in page
get(f"{BILLS}reportline/{line.pk}/change/")
"""


@pytest.fixture
def project(tmp_path: Path, servers: TestServers) -> Project:
    made = Project(tmp_path, servers)
    made.settings |= {
        "INSTALLED_APPS": [
            *(f"django.contrib.{name}" for name in ("admin", "auth", "contenttypes", "sessions", "messages")),
            *("rest_framework", "simple_history", *OWN, "shop"),
        ],
        "MIDDLEWARE": [
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
            "django.contrib.messages.middleware.MessageMiddleware",
            "ratelimits.middleware.QuotaMiddleware",
        ],
        "TEMPLATES": [
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "APP_DIRS": True,
                "OPTIONS": {
                    "context_processors": [
                        "django.template.context_processors.request",
                        "django.contrib.auth.context_processors.auth",
                        "django.contrib.messages.context_processors.messages",
                    ]
                },
            }
        ],
        "ALLOWED_HOSTS": ["*"],
        "STATIC_URL": "static/",
        "TIME_ZONE": "UTC",
        "DATABASES": {name: made.database(name) for name in ("default", "quota")},
        "DATABASE_ROUTERS": ["ratelimits.routers.RatelimitsRouter"],
    }
    made.settings["RATELIMITS"]["DATABASE"] = "quota"
    with (tmp_path / "urls.py").open("a") as urls:
        urls.write(_URLS)
    for name in ("default", "quota"):
        made.create_database(name)
    return made


def test_what_people_do_in_the_admin(project: Project) -> None:
    assert "no issues" in project.python(_MIGRATED + _SIGNED_IN + _EDITS + _REPORTS + _USERS_GO)


def test_without_the_router_a_check_says_so(project: Project) -> None:
    project.settings["DATABASE_ROUTERS"] = []
    said = project.manage("check", fails=True)
    assert "ratelimits.E005" in said
    assert "ratelimits.routers.RatelimitsRouter" in said


def test_a_manifest_is_written_and_compared_without_the_default_database(project: Project, tmp_path: Path) -> None:
    # The default database has no tables, so nobody reads them.
    project.manage("migrate", "--database", "quota", "--verbosity", "0")
    manifest = tmp_path / "2026-10.json"
    project.manage("ratelimits_manifest", "2026-10", "--output", str(manifest))
    project.manage("ratelimits_verify", "--manifest", str(manifest))
