"""A project with `USE_TZ=False`, in a time zone west of UTC: from a dated block to a report as CSV."""

from __future__ import annotations

from pathlib import Path

from tests.support.fresh import Project
from tests.support.servers import TestServers

_ADMIN = """\
INSTALLED_APPS += ["django.contrib.admin", "django.contrib.sessions", "django.contrib.messages"]
MIDDLEWARE += ["django.contrib.sessions.middleware.SessionMiddleware",
               "django.contrib.auth.middleware.AuthenticationMiddleware",
               "django.contrib.messages.middleware.MessageMiddleware"]
TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True, "OPTIONS": {
    "context_processors": ["django.template.context_processors.request",
                           "django.contrib.auth.context_processors.auth",
                           "django.contrib.messages.context_processors.messages"]}}]
STATIC_URL = "static/"
USE_TZ, TIME_ZONE = False, "America/Los_Angeles"
"""
_URLS = """
from django.contrib import admin

urlpatterns += [path("admin/", admin.site.urls)]
"""
_SCRIPT = """
import io
from datetime import UTC, datetime, timedelta

from django.contrib import admin
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from ratelimits import checks
from ratelimits.billing.models import *
from ratelimits.models import *
from ratelimits.usage.models import *
from ratelimits.rules.grants import grant
from tests.support.reports.invoices import account, close, spend

call_command("migrate", verbosity=0)
call_command("check", fail_level="WARNING", deploy=False)
now = timezone.now()
assert now.tzinfo is None
hour, client, key = timedelta(hours=1), Client(), "ip:127.0.0.1"


def expect(*statuses):
    answered = tuple(client.get("/hello/").status_code for _ in statuses)
    assert answered == statuses, (answered, statuses)


Rule.objects.create(name="few", key_kind="ip", algorithm="fixed_window", capacity=3, period=86400)
expect(200)

# A block that is over, one that begins later, and one that is in force.
Access.objects.create(target=key, reason="over", valid_from=now - 2 * hour, valid_until=now - hour)
later = Access.objects.create(target=key, reason="later", valid_from=now + hour)
expect(200)
later.delete()
block = Access.objects.create(target=key, reason="now", valid_from=now - hour, valid_until=timezone.now() + hour)
expect(403)
block.end("enough")
expect(200, 429)

# Overrides: one begins later, one is in force; a grant on top of it.
KeyOverride.objects.create(key=key, rule="few", capacity=100, valid_from=now + 24 * hour)
expect(429)
KeyOverride.objects.create(key=key, rule="few", capacity=5, valid_from=now - hour, valid_until=now + hour)
expect(200, 200, 429)
grant(key, "few", 2, timezone.now() + hour / 2, "asked for")
expect(200, 200, 429)
assert all(row.valid_until.tzinfo is UTC for row in KeyOverride.objects.exclude(valid_until=None))

# A membership that is over, then one that is in force: the plan's own rule applies.
plan = Plan.objects.create(name="Pro", slug="pro")
Rule.objects.create(name="few", plan=plan, key_kind="ip", algorithm="fixed_window", capacity=50, period=86400)
KeyOverride.objects.all().delete()
over = PlanMembership.objects.create(key=key, plan=plan, valid_from=now - 2 * hour, valid_until=now - hour)
expect(429)
PlanMembership.objects.create(key=key, plan=plan, valid_from=now - hour / 2, valid_until=now + hour)
expect(200)
assert Rule.objects.count() == 2

# A report, in files and in the admin.
acme = account("acme", included=5, timezone="America/Los_Angeles")
spend(acme, "2025-11-02T08:30", 3)
spend(acme, "2025-11-02T09:30", 4)
(report,) = close("2026-01-01")
Adjustment.objects.create(
    account="acme", period_start=report.finalised_at.replace(year=2025, month=11, day=1, hour=7, minute=0, second=0,
    microsecond=0), meter="requests", quantity=-1, reason="goodwill", author=User.objects.create(username="ada"))
out = io.StringIO()
call_command("ratelimits_report", period="2025-11", account="acme", format="csv", stdout=out)
assert "acme" in out.getvalue(), out.getvalue()
assert "2025-11-01T07:00:00Z" in out.getvalue()
call_command("ratelimits_verify", stdout=io.StringIO(), stderr=io.StringIO())

User.objects.create_superuser("root", password="x")
assert client.login(username="root", password="x")
visited = 0
for model, page in admin.site._registry.items():
    own = model._meta.app_label.startswith("ratelimits")
    names = {str(pattern.name) for pattern in page.get_urls()} if own else set()
    row = model._default_manager.first() if names else None
    for name in sorted(names):
        kind = name.removeprefix(f"{model._meta.app_label}_{model._meta.model_name}_")
        if kind in ("changelist", "open") or (kind in ("change", "history") and row is not None):
            url = reverse(f"admin:{name}", args=[] if kind in ("changelist", "open") else [row.pk])
        elif kind == "add" and model in (Access, Account, Adjustment, KeyOverride, PlanMembership, Rule):
            url = reverse(f"admin:{name}")
        else:
            continue
        assert client.get(url, follow=True).status_code == 200, url
        visited += 1
print(visited, "pages")
"""


def test_dated_rows_apply_and_are_billed_and_shown_without_time_zone_support(
    tmp_path: Path, servers: TestServers
) -> None:
    project = Project(tmp_path, servers, namespace="naive")
    project.create_database("default")
    project.settings["RATELIMITS"]["DENY_CACHE_SECONDS"] = 0
    project.write("settings.py", (tmp_path / "settings.py").read_text() + _ADMIN)
    project.write("urls.py", (tmp_path / "urls.py").read_text() + _URLS)
    pages = int(project.python(_SCRIPT).split()[-2])
    assert pages > 40
