from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from ratelimits import engine
from ratelimits.admin import readonly
from ratelimits.billing.models import Report, ReportLine
from ratelimits.billing.reports.verify.totals import verify_totals
from ratelimits.engine.call import new_nonce, shard_of_usage
from ratelimits.engine.counting import Count, RefusalCount
from ratelimits.engine.server import current_server
from ratelimits.models import Account, ConfigVersion, Rule
from ratelimits.usage.models import ArchivedRange, Batch, DurabilityGap, Line, PeriodUsage, QuarantinedBatch, ShardState
from tests.support.reports.invoices import close, spend
from tests.support.rows import rule
from tests.support.usage.traffic import flow, use

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fsync_at_once")]

MODELS = [ShardState, Batch, Line, PeriodUsage, DurabilityGap, QuarantinedBatch, ArchivedRange, Report, ReportLine]


def url(model: Any, page: str = "changelist", *arguments: Any) -> str:
    return reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_{page}", args=arguments)


def text(response: Any) -> str:
    """Return the text of the page, without its tags."""
    assert response.status_code == 200, response
    return unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", response.content.decode())))


@pytest.mark.parametrize("model", MODELS)
def test_what_workers_write_people_only_read(admin_client: Client, model: Any) -> None:
    use()
    flow()
    DurabilityGap.objects.create(event="x", kind="wipe", shard=1, since=1, until=2)
    assert admin_client.get(url(model)).status_code == 200
    assert admin_client.get(url(model, "add")).status_code == 403
    row = model.objects.order_by("pk").first()
    if row is None:
        return
    page = url(model, "change", row.pk)
    assert "Save" not in text(admin_client.get(page))
    assert admin_client.post(page, {"account": "mine"}).status_code == 403
    assert admin_client.post(url(model, "delete", row.pk), {"post": "yes"}).status_code == 403
    assert "delete_selected" not in admin_client.get(url(model)).content.decode()


@pytest.mark.parametrize("model", MODELS)
def test_a_list_counts_and_sorts_no_more_than_it_shows(
    admin_client: Client, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readonly, "MAX_ROWS", 3)
    monkeypatch.setattr(admin.site.get_model_admin(model), "list_per_page", 2)
    for number in range(5):
        use(f"account {number}")
        flow()
    with CaptureQueriesContext(
        connection,
    ) as queries:
        page = admin_client.get(url(model))
    counted = [query["sql"] for query in queries if "COUNT(" in query["sql"]]
    assert len(counted) == 1
    assert "LIMIT 3" in counted[0]
    table = model._meta.db_table
    listed = page.context["cl"]
    whole = [query["sql"] for query in queries if f'"{table}"' in query["sql"] and "LIMIT" not in query["sql"]]
    assert whole == [] or listed.result_count <= 2
    assert (listed.result_count <= 3, len(listed.result_list) <= 2) == (True, True)


def test_the_ledger_is_searched_by_account_through_its_index(admin_client: Client) -> None:
    use("acme")
    use("other")
    flow()
    page = admin_client.get(url(Line), {"q": "acme"})
    assert [line.account for line in page.context["cl"].result_list] == ["acme"]
    assert list(admin_client.get(url(Line), {"q": "acm"}).context["cl"].result_list) == []
    with CaptureQueriesContext(connection) as queries:
        admin_client.get(url(Line), {"q": "acme"})
    (listed,) = [query["sql"] for query in queries if "COUNT(" in query["sql"]]
    assert '"account" IN' in listed


@contextmanager
def indexes_preferred() -> Iterator[None]:
    """Make PostgreSQL use indexes: without this it reads tables as small as a test's as a whole."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SET enable_seqscan = off")
        yield
        if connection.vendor == "postgresql":
            cursor.execute("RESET enable_seqscan")


@pytest.mark.parametrize(
    ("model", "term", "index"),
    [
        (Line, "acme ltd", "ratelimits_line_account"),
        (Line, "acme ltd api_key:1", "ratelimits_line_(account|key)"),
        (Batch, "{incarnation}", "ratelimits_(usage_)?batch_(identity|1)"),
        (ReportLine, "{line_id}", "ratelimits_billing_reportline_line_id"),
        (ReportLine, "acme ltd", "report"),
        (ReportLine, "acme ltd api_key:1", "report"),
        (PeriodUsage, "acme ltd", "ratelimits_(usage_)?period_?usage"),
        (Report, "acme ltd", "ratelimits_(billing_)?report_(version|1)"),
    ],
)
def test_a_search_finds_what_it_names_by_an_index(admin_client: Client, model: Any, term: str, index: str) -> None:
    for account, key in (("acme ltd", "api_key:1"), ("acme ltd", "api_key:12"), ("other", "api_key:1")):
        spend(account, "2026-10-15", key=key)
    (_report, _other) = close("2026-11-02")
    line = ReportLine.objects.get(key="api_key:1", report__account="acme ltd")
    batch = Batch.objects.earliest("pk")
    with indexes_preferred():
        found = admin_client.get(
            url(model), {"q": term.format(line_id=line.line_id, incarnation=batch.incarnation)}
        ).context["cl"]
        rows = list(found.result_list)
        plan = found.queryset[:100].explain()
    if term.endswith("api_key:1"):
        assert {row.key for row in rows} == {"api_key:1"}
    if model is ReportLine:
        assert line in rows
        assert {row.report.account for row in rows} == {"acme ltd"}
    elif model is not Batch:
        assert {row.account for row in rows} == {"acme ltd"}
    assert rows
    assert not re.search(rf"SCAN {model._meta.db_table}|Seq Scan on {model._meta.db_table}", plan), plan
    assert re.search(index, plan), plan


@pytest.mark.parametrize("model", [Line, ReportLine, Batch])
def test_a_search_for_what_there_is_not_finds_nothing(admin_client: Client, model: Any) -> None:
    spend("acme", "2026-10-15")
    close("2026-11-02")
    for term in ("acm", "acme api_key", "acme api_key:12", "acme api_key:1 x"):
        assert list(admin_client.get(url(model), {"q": term}).context["cl"].result_list) == []


def test_accounts_are_found_by_their_names_and_keys_alone(admin_client: Client, client: Client) -> None:
    Account.objects.create(identifier="a1", name="Acme Ltd")
    Account.objects.create(identifier="a2", name="ACME LTD")
    for payer, key in (("a1", "user:7"), ("a2", "user:8"), ("a3", "user:7"), ("", "ip:203.0.113.9")):
        use(payer, key, now=None, configuration=ConfigVersion.read("default")[0])
    flow()
    DurabilityGap.objects.create(event="x", kind="forced", account="a1", since=1, until=2)

    def found(model: Any, term: str) -> set[str]:
        return {row.account for row in admin_client.get(url(model), {"q": term}).context["cl"].result_list}

    for model in (Line, PeriodUsage, DurabilityGap):
        assert found(model, "acme ltd") == ({"a1"} if model is DurabilityGap else {"a1", "a2"})
        assert found(model, "acme") == set()
    assert found(Line, "acme ltd user:8") == {"a2"}
    assert found(Line, "user:7") == {"a1", "a3"}
    assert found(Line, "203.0.113.9") == {""}
    viewer = User.objects.create(username="viewer", is_staff=True)
    viewer.user_permissions.add(Permission.objects.get(codename="view_line"))
    client.force_login(viewer)
    assert not client.get(url(Line), {"q": "acme ltd"}).context["cl"].result_list, "names are for who may view them"


def test_a_batch_s_page_leads_to_its_lines(admin_client: Client) -> None:
    for account in ("acme", "other"):
        use(account)
        flow()
    batch = Batch.objects.earliest("pk")
    page = admin_client.get(url(Batch, "change", batch.pk)).content.decode()
    (link,) = re.findall(r'href="([^"]*/line/\?[^"]*)"', page)
    listed = admin_client.get(unescape(link)).context["cl"].result_list
    assert [line.pk for line in listed] == list(batch.lines().values_list("pk", flat=True))


def test_batches_are_listed_by_shard(admin_client: Client) -> None:
    for account in ("acme", "other"):
        use(account)
    flow()
    first = Batch.objects.earliest("shard")
    page = admin_client.get(url(Batch), {"shard": first.shard})
    assert [batch.shard for batch in page.context["cl"].result_list] == [first.shard]
    assert len(admin_client.get(url(Batch), {"shard": "x"}).context["cl"].result_list) == 2


@pytest.mark.parametrize("model", [Line, ReportLine])
def test_a_search_for_many_words_takes_few_queries(admin_client: Client, model: Any) -> None:
    with CaptureQueriesContext(connection) as seen:
        assert admin_client.get(url(model), {"q": "a " * 500}).status_code == 200
    assert len(seen) < 60


def test_every_page_of_the_app_is_registered() -> None:
    assert {model for model in MODELS if not admin.site.is_registered(model)} == set()


def test_lines_and_usage_show_what_a_rule_in_shadow_mode_would_have_refused(admin_client: Client) -> None:
    dry = rule("dry")
    usage = engine.Usage("acme", "api_key:1", (engine.Meter("requests", 0, 1),))
    server = current_server()
    shard = shard_of_usage(server.keyspace, usage)
    command = Count(server.keyspace.head(shard), server.keyspace.open(shard), "s")
    command.add(RefusalCount(usage, (1,), dry.pk, dry.version, 3))
    server.wire.call(command, new_nonce())
    flow()
    for model in (Line, PeriodUsage):
        row = admin_client.get(url(model)).content.decode().partition(">dry</a>")[2].partition("</tr>")[0]
        cells = dict(re.findall(r'<td class="field-(\w+)">(\d+)</td>', row))
        assert (cells["denied_requests"], cells["shadow_requests"]) == ("0", "3")
    assert list(verify_totals("default")) == []
    PeriodUsage.objects.filter(rule=dry.pk).update(shadow_requests=2)
    (finding,) = verify_totals("default")
    assert "says 2 shadow_requests, but the ledger's lines say 3" in finding
    PeriodUsage.objects.filter(rule=dry.pk).update(shadow_requests=None)  # as in rows of before the column
    assert list(verify_totals("default")) == []


def test_usage_says_which_numbers_can_still_change(admin_client: Client) -> None:
    spend("acme", "2025-10-10", 7)
    close("2025-11-03")
    spend("acme", "2025-11-10", 5)
    flow()
    page = admin_client.get(url(PeriodUsage)).content.decode()
    assert re.findall(r'<td class="field-state[^"]*">(\w+)</td>', page) == ["provisional", "finalised"]


def test_lines_and_usage_name_their_rules_by_a_fixed_number_of_queries(admin_client: Client) -> None:
    def count(model: Any) -> int:
        with CaptureQueriesContext(connection) as queries:
            admin_client.get(url(model))
        return len(queries)

    named, gone = rule("first").pk, rule("gone").pk
    version = ConfigVersion.read("default")[0]
    use("acme", rule=named, configuration=version)
    flow()
    before = [count(model) for model in (Line, PeriodUsage)]
    for number in (gone, 0):
        use("acme", rule=number, configuration=version)
    flow()
    assert [count(model) for model in (Line, PeriodUsage)] == before
    Rule.objects.filter(pk=gone).delete()
    for model in (Line, PeriodUsage):
        page = admin_client.get(url(model))
        cells = re.findall(r'<td class="field-rule_link">(.*?)</td>', page.content.decode())
        link = f'<a href="/admin/ratelimits/rule/{named}/change/">first</a>'
        assert sorted(cells) == sorted([link, str(gone), "–"])
        row = model.objects.get(rule=named)
        assert link in admin_client.get(url(model, "change", row.pk)).content.decode()
