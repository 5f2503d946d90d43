"""Test the command `ratelimits_erase` and the action of the admin."""

from __future__ import annotations

import io
import logging
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission
from django.core.management import CommandError, call_command
from django.test import Client

from ratelimits.identity import Identity
from ratelimits.models import Access, Account, Customer, KeyOverride
from ratelimits.quota.checking import check
from ratelimits.salts import Pseudonyms
from ratelimits.usage.customers.move import move
from ratelimits.usage.erasure.erase import erase, preview
from ratelimits.usage.erasure.everywhere import erase_everywhere
from ratelimits.usage.ledger.retention import archive
from tests.support.entry_points import begin_afresh
from tests.support.reports.invoices import spend
from tests.support.reports.searched import found
from tests.support.rows import rule
from tests.support.usage.traffic import at, flow
from tests.usage.erasure import books
from tests.usage.erasure.books import NAMES, TEXT
from tests.usage.erasure.test_erase import in_files

pytestmark = pytest.mark.django_db(transaction=True)

ACCOUNTS = "/admin/ratelimits/account/"


def run(*arguments: str) -> str:
    out = io.StringIO()
    call_command("ratelimits_erase", *arguments, stdout=out, stderr=out)
    return out.getvalue()


def test_the_command_says_what_it_would_replace_and_changes_nothing() -> None:
    erased = books.write()
    named = found(NAMES)
    said = run(TEXT)
    assert f"Customer {erased.token}: {TEXT}" in said
    assert "report lines: " in said
    assert f"ratelimits_erase {erased.token} --yes" in said
    assert found(NAMES) == named
    with pytest.raises(CommandError, match="neither the token"):
        run("nobody")


@pytest.mark.parametrize("moved", [False, True])
def test_the_preview_counts_what_is_replaced(moved: bool) -> None:
    erased = books.write()
    if moved:
        move(TEXT, None, at("2026-11-20") // 10**6)
        spend(TEXT, "2026-11-25", 5, key="user:grace")
        flow()
    said = preview(erased).rows
    assert said == erase(erased).rows
    assert len(said) == 14
    # The reset in the books was made today.
    assert [name for name, count in said.items() if not count] == (["resets"] if moved else ["moves"])


def test_the_command_drains_first_and_logs_no_name(caplog: pytest.LogCaptureFixture) -> None:
    erased = books.write()
    spend(TEXT, "2026-11-06", 3, key=books.KEYS[0])
    with caplog.at_level(logging.INFO):
        said = run(erased.token, "--yes")
    assert "was erased" in said
    assert not any(name in caplog.text + said for name in NAMES)
    assert found(NAMES) == []


@pytest.mark.slow
def test_the_command_names_the_archives_that_it_needs(tmp_path: Path) -> None:
    erased = books.write()
    list(archive.prune("default", at("2026-11-01") // 10**6, tmp_path))
    assert "not given: --archive" in run(erased.token)
    with pytest.raises(CommandError, match="were not given"):
        run(erased.token, "--yes")
    assert "written again: " in run(erased.token, "--archive", str(tmp_path), "--yes")
    assert in_files(tmp_path) == []


def test_limits_of_an_erased_customer_begin_again(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": lambda request: "ada", "DENY_CACHE_SECONDS": 0}
    begin_afresh(monkeypatch)
    rule("limit", "fixed_window", capacity=2, period=86_400, key_kind="account")
    who = Identity("user:ada", None, "account:ada")
    assert [check(who).allowed for _number in range(3)] == [True, True, False]
    with pytest.raises(CommandError, match="ratelimits_drain"):
        run("ada", "--yes")
    flow()
    run("ada", "--yes")
    assert "user:ada" not in str(found(("user:ada",)))
    assert check(who).allowed


def choose(client: Client, pk: int, **values: str) -> str:
    data = {"action": "erase_customer", "_selected_action": str(pk), **values}
    return unescape(client.post(ACCOUNTS, data, follow=True).content.decode())


def test_the_admin_asks_and_then_erases_and_logs_the_token(admin_client: Client) -> None:
    erased = books.write()
    pk = Account.objects.get(identifier=TEXT).pk
    page = choose(admin_client, pk)
    assert "This cannot be undone" in page
    assert Customer.objects.get(pk=erased.pk).salt
    why = f"{TEXT} asked (42)"
    assert why in choose(admin_client, pk, change_reason=why)
    pseudonym = Pseudonyms(erased.salt).account(TEXT)
    assert f"Customer {erased.token} was erased" in choose(admin_client, pk, _confirmed="1", change_reason=why)
    assert found(NAMES) == []
    entry = LogEntry.objects.latest("pk")
    assert (entry.object_repr, entry.change_message) == (erased.token, f"Erased: {pseudonym} asked (42)")
    record = Account.history.filter(id=pk).latest("history_id")
    assert record.history_change_reason == f"customer {erased.token} was erased: {pseudonym} asked (42)"[:100]
    assert record.history_user.username == "admin"


@pytest.mark.slow
def test_no_change_of_an_erasure_is_offered_to_be_undone(admin_client: Client) -> None:
    erased = books.write()
    erase_everywhere(erased)
    page = unescape(admin_client.get("/admin/ratelimits/change/").content.decode())
    reason = f"customer {erased.token} was erased"
    assert page.count("This came with the erasure of a customer, which cannot be undone.") == page.count(reason) == 5
    for model in (Account, KeyOverride):
        record = model.history.filter(history_change_reason=reason).latest("history_id")
        undo = f"/admin/ratelimits/change/undo/{model._meta.model_name}/{record.history_id}/"
        for data in ({}, {"_confirmed": "1"}):
            answer = admin_client.post(undo, data, follow=True)
            assert "This came with the erasure of a customer" in unescape(answer.content.decode())
    assert Account.objects.get(identifier=erased.names.get().identifier).name == ""
    assert not KeyOverride.objects.filter(key__contains="~").exists()


def test_the_command_says_who_erased_and_why(caplog: pytest.LogCaptureFixture) -> None:
    erased = books.write()
    with pytest.raises(CommandError, match="no user"):
        run(TEXT, "--by", "nobody", "--yes")
    pseudonym = Pseudonyms(erased.salt).account(TEXT)
    with caplog.at_level(logging.INFO):
        run(TEXT, "--by", "staff", "--reason", f"asked by {TEXT}", "--yes")
    assert f"was erased: asked by {pseudonym}" in caplog.text
    entry = LogEntry.objects.latest("pk")
    said = (entry.user.username, entry.object_repr, entry.change_message)
    assert said == ("staff", erased.token, f"Erased: asked by {pseudonym}")
    for model in (Account, KeyOverride, Access):
        record = model.history.filter(history_change_reason__startswith=f"customer {erased.token}").latest("history_id")
        assert record.history_user.username == "staff"
    assert found(NAMES) == []


@pytest.mark.slow
def test_the_admin_erases_one_customer_at_a_time_and_no_archives(admin_client: Client, tmp_path: Path) -> None:
    books.write()
    first, second = Account.objects.order_by("pk").values_list("pk", flat=True)
    data = {"action": "erase_customer", "_selected_action": [str(first), str(second)]}
    assert "Choose the account of one customer" in admin_client.post(ACCOUNTS, data, follow=True).content.decode()
    list(archive.prune("default", at("2026-11-01") // 10**6, tmp_path))
    assert "use the command ratelimits_erase" in choose(admin_client, first)
    assert Customer.objects.filter(salt="").count() == 0


def test_only_who_may_erase_sees_the_action(client: Client, django_user_model: Any) -> None:
    books.write()
    staff = django_user_model.objects.create(username="viewer", is_staff=True)
    staff.user_permissions.set(Permission.objects.filter(codename__in=["view_account", "change_account"]))
    client.force_login(staff)
    assert "erase_customer" not in client.get(ACCOUNTS).content.decode()
    staff.user_permissions.add(Permission.objects.get(codename="erase"))
    client.force_login(django_user_model.objects.get(pk=staff.pk))
    assert "erase_customer" in client.get(ACCOUNTS).content.decode()
