"""Run the code blocks of pages that have no test module of their own. Look that a test runs each of the others."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from datetime import timedelta
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import UUID

import pytest
from django.conf import settings
from django.conf.urls.i18n import i18n_patterns
from django.contrib.auth.models import User
from django.core.checks import run_checks
from django.core.management import execute_from_command_line
from django.http import HttpRequest, HttpResponse
from django.test import Client, RequestFactory, override_settings
from django.urls import include, path
from django.utils import timezone

from project.models import ApiKey
from ratelimits.conf import DEFAULTS
from ratelimits.identity import Identity
from ratelimits.quota import checking
from ratelimits.signals import request_refused, threshold_reached
from ratelimits.status.fact import Level
from ratelimits.status.facts import facts
from ratelimits.testing import override_rules
from ratelimits.usage.alerts.deliver import webhook_body
from ratelimits.usage.models import Alert, TaskRun
from tests.support.reports.invoices import account, close, spend
from tests.support.rows import rule
from tests.support.snippets import ROOT, snippet, snippets

#: Pages whose code blocks are all run by one test module.
WHOLE_PAGES = {
    "README.md": "tests/test_readme.py",
    "docs/decide.md": "tests/decide/test_page.py",
    "docs/quickstart.md": "tests/test_quickstart.py",
    "docs/billing/*.md": "tests/billing/reports/test_billing_pages.py",
    "docs/moving.md": "tests/moving/test_guide.py",
    "docs/rules-as-code.md": "tests/as_code/test_page.py",
    "docs/outbound.md": "tests/outbound/test_page.py",
    "docs/requests/who.md": "tests/identity/test_who.py",
    "docs/scaling.md": "tests/end_to_end/test_scaling_page.py",
    "docs/testing.md": "tests/testing/test_projects.py",
}
#: Tests elsewhere that run one code block, and a phrase of this block.
RUN_BY = {
    "manage.py ratelimits_doctor": "tests/doctor/test_command.py::test_a_server_on_which_everything_works",
    "Restart=always": "tests/chaos/test_workers.py::test_a_broker_is_killed",
    '"api_views": True': "tests/test_security.py::test_failed_logins_of_an_api_are_limited_by_the_middleware_alone",
    "socket_keepalive_options": "tests/engine/transport/test_idle.py::test_the_options_of_the_page_are_used",
    "async def search(request, q: str)": "tests/ninja/test_operations.py::test_the_snippet_of_the_page_runs",
    "def refused(request, answer)": "tests/test_alike.py::test_the_function_of_the_documentation_works",
    'INSTALLED_APPS += ["ratelimits"]': "tests/without/test_projects.py::test_a_project_without_it_works",
    "TENANT_APPS": "tests/test_routers.py::test_the_tenants_of_django_tenants_share_the_tables",
    "class ChatView": "tests/quota/test_settling.py::test_the_view_of_the_page_settles_its_stream",
    "def prices(request)": "tests/answers/test_caching.py::test_the_page_of_the_documentation_is_cached",
    "class Answers": "tests/quota/test_settling.py::test_the_view_of_the_page_about_costs_has_bounds",
    "def verified(secret": (
        "tests/usage/alerts/test_deliver.py::test_the_documented_receiver_takes_a_webhook_and_no_other"
    ),
    "import json, os, stripe": (
        "tests/billing/reports/exports/test_billing.py::test_the_documented_sender_sends_each_event_once"
    ),
    "owed = Counter()": (
        "tests/billing/reports/exports/test_focus.py::test_the_snippet_of_the_page_adds_up_what_accounts_owe"
    ),
    "python manage.py demo\n": (
        "tests/end_to_end/test_demo.py"
        "::test_the_demo_keeps_running_with_no_difference_and_fails_when_the_ledger_lost_a_line"
    ),
    "python -m benchmarks.decide": (
        "tests/test_benchmarks.py::test_a_benchmark_runs_prints_its_table_and_writes_its_json"
    ),
}
#: Phrases of commands that no test runs, because they need the package index or are the test run itself.
NOT_RUN = ("pip install", "pip uninstall", "pytest tests/algorithms")


def run(phrase: str, **names: Any) -> dict[str, Any]:
    """Run the code block with this phrase; return its names."""
    found = snippet(phrase)
    exec(compile(found.text, found.page, "exec"), names)
    return names


def test_every_code_block_is_run_by_a_test() -> None:
    own = Path(__file__).read_text()
    here = re.findall(r"(?:run|snippet|shell)\(\n? *[\"'](.+?)[\"'][,)]", own)
    elsewhere = [*RUN_BY, *NOT_RUN]
    left = [
        f"{one.page}: {one.text.splitlines()[0]}"
        for one in snippets()
        if not any(fnmatch(one.page, pages) for pages in WHOLE_PAGES)
        and not any(phrase in one.text for phrase in (*here, *elsewhere))
    ]
    assert left == [], "run them here, or in a test of their room that RUN_BY names"


@pytest.mark.parametrize("module", WHOLE_PAGES.values())
def test_the_modules_for_whole_pages_exist(module: str) -> None:
    assert (ROOT / module).exists()


@pytest.mark.parametrize(("phrase", "test"), RUN_BY.items(), ids=RUN_BY.values())
def test_the_tests_for_single_blocks_exist(phrase: str, test: str) -> None:
    assert any(phrase in one.text for one in snippets())
    module, _, name = test.partition("::")
    assert f"def {name}(" in (ROOT / module).read_text()


@pytest.mark.django_db
class TestInDjango:
    def test_the_inspector_finds_the_names_of_api_keys(self, admin_client: Client) -> None:
        ada = User.objects.create(username="ada")
        key, _secret = ApiKey.objects.issue(name="Ada's phone", user=ada)
        search = run("def search(text)", ApiKey=ApiKey)["search"]
        expected = [(key.limit_key, "Ada's phone")]
        assert list(search("phone")) == list(search(str(key.pk))) == expected
        with override_settings(RATELIMITS={**settings.RATELIMITS, "KEY_SEARCH": search}):
            page = admin_client.get("/admin/ratelimits/inspect/", {"q": "phone"}, follow=True)
        assert f"The account of {key.limit_key} is not known" in page.content.decode()

    def test_the_admin_speaks_the_language_of_the_browser(self, admin_client: Client) -> None:
        names = run("LocaleMiddleware", MIDDLEWARE=[])
        session = settings.MIDDLEWARE.index("django.contrib.sessions.middleware.SessionMiddleware")
        others = [name for name in settings.MIDDLEWARE if name not in names["MIDDLEWARE"]]
        placed = [*others[: session + 1], *names["MIDDLEWARE"], *others[session + 1 :]]
        with override_settings(MIDDLEWARE=placed, LANGUAGES=names["LANGUAGES"], LANGUAGE_CODE="en"):
            seen = {
                language: "规则" in admin_client.get("/admin/", headers={"Accept-Language": language}).content.decode()
                for language in ("en", "zh-hans")
            }
        assert seen == {"en": False, "zh-hans": True}

    def test_a_receiver_learns_that_a_rule_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        note = run("def note(answer")["note"]
        try:
            with override_rules([{"name": "burst", "rate": "1/h", "key_kind": "ip"}]):
                for _request in range(2):
                    checking.check(Identity(address="ip:192.0.2.1"), "search")
        finally:
            request_refused.disconnect(note)
        assert capsys.readouterr().out == "ip:192.0.2.1 was refused in search by burst\n"

    def test_prometheus_is_set_up(self) -> None:
        assert run('RATELIMITS["TELEMETRY"] =', RATELIMITS={})["RATELIMITS"] == {"TELEMETRY": ["prometheus"]}
        (route,) = run('path("metrics/ratelimits"', urlpatterns=[], path=path)["urlpatterns"]
        with override_settings(RATELIMITS={**settings.RATELIMITS, "TELEMETRY": ["prometheus"]}):
            assert b"ratelimits_redis_up 1.0" in route.callback(RequestFactory().get("/metrics/ratelimits")).content


def page(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("fsync_at_once")
class TestWithoutTheFrameworkAndCelery:
    @pytest.fixture
    def shop(self, settings: Any) -> None:
        """Apply the settings of the page to the settings of the tests."""
        others = [name for name in settings.MIDDLEWARE if "ratelimits" not in name]
        names = run('"/contact/": {', MIDDLEWARE=others, LANGUAGES=settings.LANGUAGES)
        names["RATELIMITS"] |= {"NAMESPACE": settings.RATELIMITS["NAMESPACE"]}
        settings.MIDDLEWARE = names["MIDDLEWARE"]
        settings.RATELIMITS = {**settings.RATELIMITS, "SEAL_INTERVAL": DEFAULTS["SEAL_INTERVAL"], **names["RATELIMITS"]}
        urls = ModuleType("urls")
        urls.urlpatterns = [path("contact/", page), *i18n_patterns(path("search/", page))]  # type: ignore[attr-defined]
        settings.ROOT_URLCONF = urls

    @pytest.mark.usefixtures("shop")
    def test_the_paths_are_limited_in_each_language(self, client: Client) -> None:
        with override_rules([{"name": "searches", "rate": "2/h", "key_kind": "ip", "scope": "search"}]):
            paths = "/en/search/", "/contact/", "/zh-hans/search/", "/en/search/", "/zh-hans/search/", "/contact/"
            answers = [client.get(path).status_code for path in paths]
        assert answers == [200, 200, 200, 429, 429, 200]
        assert {one.id for one in run_checks(tags=["ratelimits"])} & {"ratelimits.W008", "ratelimits.W009"} == set()

    @pytest.mark.usefixtures("shop")
    def test_the_status_page_is_green_between_two_runs_of_cron(self) -> None:
        for line in snippet("ratelimits_seal && python").text.splitlines():
            for command in line.split("&& ")[1:]:
                execute_from_command_line(shlex.split(command)[1:])
        rows = {run.task: run.succeeded_at for run in TaskRun.objects.all()}
        for task, seconds in {"seal": 60, "drain": 60, "finalise": 3_600}.items():
            assert rows[task] is not None
            TaskRun.objects.filter(task=task).update(succeeded_at=timezone.now() - timedelta(seconds=seconds + 30))
        levels = {fact.name: fact.level for fact in facts()}
        assert {levels[task] for task in ("seal", "drain", "finalise", "watermark")} == {Level.GREEN}


class TestAlerts:
    ALERT = Alert(
        id=UUID(int=7), account="acme", meter="requests", period=1_793_491_200, period_end=1_796_083_200,
        threshold=80, basis="included", used=8123, quantity=10_000, raised_at=timezone.now(),
    )  # fmt: skip

    def test_a_receiver_learns_of_a_threshold(self, capsys: pytest.CaptureFixture[str]) -> None:
        tell_sales = run("def tell_sales")["tell_sales"]
        try:
            threshold_reached.send(sender=Alert, alert=self.ALERT)
        finally:
            threshold_reached.disconnect(tell_sales)
        assert capsys.readouterr().out == "acme has reached 80 % of 10000 requests\n"

    def test_the_body_of_a_webhook_is_as_shown(self) -> None:
        shown, sent = json.loads(snippet('"ratelimits.threshold_reached"').text), json.loads(webhook_body(self.ALERT))
        for body in (shown, sent):
            for varying in ("alert_id", "timestamp"):
                body[varying] = type(body.pop(varying, None) or body["data"].pop(varying))
        assert sent == shown


def keys_of(value: Any) -> Any:
    """Return the names in a JSON value, without its values."""
    if isinstance(value, dict):
        return {name: keys_of(inner) for name, inner in value.items()}
    return [keys_of(inner) for inner in value[:1]] if isinstance(value, list) else None


@pytest.fixture
def november(transactional_db: None, fsync_at_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Finalise a month in which an account used two units above its plan. Enter an empty folder, and return it."""
    spend(account(included=5), "2026-11-10T12:00", 7)
    close("2026-12-02")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shell(phrase: str, folder: Path) -> str:
    """Run the commands of a code block; return the body that it sends to another system.

    `manage.py` runs in this process. `curl` is a script that keeps the body.
    """
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    (programs / "curl").write_text(f"#!/bin/sh\nexec cat > '{folder / 'sent'}'\n")
    (programs / "curl").chmod(0o755)
    others = []
    for command in snippet(phrase).text.splitlines():
        if command.startswith("python manage.py "):
            execute_from_command_line(shlex.split(command)[1:])
        else:
            others.append(command)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "LAGO_KEY": "secret"}
    subprocess.run(["bash", "-euo", "pipefail", "-c", "\n".join(others)], env=environment, check=True)
    sent = folder / "sent"
    return sent.read_text() if sent.exists() else ""


class TestReports:
    def test_the_usage_api_answers_as_shown(self, november: Path, admin_client: Client) -> None:
        rule("monthly", "fixed_window", capacity=100, period=86_400, bills=True, key_kind="account")
        urls = ModuleType("urls")
        urls.__dict__.update(run('include("ratelimits.usage.api.urls")', urlpatterns=[], include=include, path=path))
        with override_settings(ROOT_URLCONF=urls):
            answer = admin_client.get("/usage/", {"account": "acme", "from": "2026-11-01", "to": "2026-12-01"})
        assert keys_of(answer.json()) == keys_of(json.loads(snippet('"complete_until"').text))

    def test_a_report_is_written_in_python(self, november: Path) -> None:
        run('csv_format = FORMATS["csv"]')
        assert "acme" in (november / "november.csv").read_text()

    def test_commands_write_files_and_send_them(self, november: Path) -> None:
        shell("--output november.xlsx", november)
        assert (november / "november.xlsx").stat().st_size > 0
        (event,) = json.loads(shell("split -l 500", november))
        shown = snippet("eventType:").text
        assert f"eventType: {event['type']}\n" in shown
        assert set(re.findall(r"\$\.(\w+)", shown)) <= event["data"].keys()
        (event,) = json.loads(shell("--output november.lago.ndjson", november))["events"]
        assert (event["external_subscription_id"], event["properties"]["overage_quantity"]) == ("acme", "2")

    def test_a_file_is_as_shown_and_follows_the_schema(self, november: Path) -> None:
        execute_from_command_line(["manage.py", "ratelimits_report", "--period=2026-11", "--output=november.json"])
        run("Draft202012Validator(schema())")
        written = Path("november.json").read_text()
        names = re.findall(r'"(\w+)":', snippet('"urn:ratelimits:schema:report:v1"').text)
        assert [name for name in names if f'"{name}":' not in written] == []


def test_the_time_of_imports_is_shown(tmp_path: Path) -> None:
    """Run the commands with a small script in the place of manage.py, which other tests run."""
    (tmp_path / "manage.py").write_text("import json\n")
    commands = snippet("-X importtime").text.replace("python", shlex.quote(sys.executable))
    shown = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert len(shown) == 20
    assert "json" in "".join(shown)
