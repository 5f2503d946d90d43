from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.db import connection
from django.test import override_settings

from ratelimits.billing.reports.cross_check import Comparison, compare
from ratelimits.billing.reports.statements import rows, statements
from ratelimits.models.accounts.named import named_now
from ratelimits.usage.counting import process_totals
from ratelimits.usage.counting.process_totals import TotalKey
from ratelimits.usage.ledger import process_totals as totals
from ratelimits.usage.models import DurabilityGap, ProcessTotal
from tests.support.usage.traffic import NOON, at, flow, use

pytestmark = pytest.mark.django_db(transaction=True)

BIN = NOON // 10**6


def total(kind: str = "admitted", account: str = "acme", key: str = "", start: int = BIN) -> TotalKey:
    return TotalKey(kind, account, key, "requests", start)  # type: ignore[arg-type]


def written() -> set[tuple[str, str, int, int]]:
    return set(ProcessTotal.objects.values_list("process", "kind", "requests", "units"))


def test_totals_are_absolute_so_writing_them_again_changes_nothing() -> None:
    totals.write("p1", {total(): (3, 3)})
    totals.write("p1", {total(): (3, 3)})
    totals.write("p1", {total(): (5, 254)})
    totals.write("p2", {total(): (1, 1)})
    assert written() == {("p1", "admitted", 5, 254), ("p2", "admitted", 1, 1)}


def test_what_processes_were_granted_is_set_beside_the_ledger() -> None:
    for _ in range(4):
        use()
    flow()
    totals.write("p1", {total(): (3, 3), total("unanswered", key="api_key:1"): (2, 2)})
    month = at("2026-11-01"), at("2026-12-01")
    (comparison,) = compare("default", named_now("default", ["acme"])["acme"], *month)
    assert comparison == Comparison("requests", ledger=4, counted=3, unanswered=2, unmetered=0)
    assert comparison.holds
    totals.write("p2", {total(): (2, 2)})
    (comparison,) = compare("default", named_now("default", ["acme"])["acme"], *month)
    assert not comparison.holds


def test_lost_replies_and_unmetered_requests_are_on_the_report() -> None:
    use()
    use(account="other", key="api_key:9")
    flow()
    lost, free = total("unanswered", key="api_key:1"), total("unmetered", key="api_key:2")
    totals.write("p1", {lost: (2, 20), free: (4, 40)})
    totals.write("p2", {lost: (1, 10)})
    found = list(rows(statements("2026-11")))
    unknown = {(row.account, row.key): row.unknown_count for row in found}
    assert unknown == {("acme", "api_key:1"): 3, ("other", "api_key:9"): 0}
    gaps = {row.account: row.durability_gap for row in found}
    bin_ = "2026-11-21T12:00:00Z/2026-11-21T12:14:59.999999Z"
    assert gaps["acme"] == f"unknown {bin_} at-most=30; unmetered {bin_} unmetered=40"
    assert gaps["other"] == ""
    assert DurabilityGap.objects.count() == 2


def test_a_key_of_which_only_lost_replies_are_known_has_a_line_of_its_own() -> None:
    use()
    flow()
    totals.write("p1", {total("unanswered", key="api_key:lost"): (2, 2)})
    lost = [row for row in rows(statements("2026-11")) if row.key == "api_key:lost"]
    assert [(row.consumed_quantity, row.unknown_count) for row in lost] == [(0, 2)]


def test_usage_without_an_account_is_no_gap_of_everybodys() -> None:
    use()
    flow()
    totals.write("p1", {total("unmetered", account="", key="anonymous"): (2, 2)})
    assert [row.durability_gap for row in rows(statements("2026-11"))] == [""]


def test_processes_that_write_at_once_declare_what_all_of_them_saw() -> None:
    def other() -> None:
        try:
            totals.write("p2", {total("unmetered", key="k"): (5, 50)})
        finally:
            connection.close()

    totals.write("p0", {total("unmetered", key="k"): (2, 20)})
    beside = threading.Thread(target=other)

    def write_behind(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
        result = execute(sql, params, many, context)
        if "SUM(" in sql and beside.ident is None:
            beside.start()
            beside.join(1)  # it waits for this transaction; otherwise it would be done by now
        return result

    with connection.execute_wrapper(write_behind):
        totals.write("p1", {total("unmetered", key="k"): (1, 10)})
    beside.join()
    gap = DurabilityGap.objects.get()
    assert (gap.units, gap.detail) == (80, "8 requests")


def test_the_gap_counts_a_request_once_however_many_meters_it_has() -> None:
    with_tokens = total("unmetered", key="api_key:1")._replace(meter="tokens")
    other = total("unmetered", key="api_key:2")
    totals.write("p1", {total("unmetered", key="api_key:1"): (14, 14), with_tokens: (14, 700)})
    assert DurabilityGap.objects.get().detail == "14 requests"
    totals.write("p2", {other: (3, 3), other._replace(meter="tokens"): (2, 9)})
    assert DurabilityGap.objects.get().detail == "at least 17 requests"


def test_no_total_is_written_without_its_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(*_args: Any) -> None:
        raise KeyboardInterrupt

    lost = {total("unmetered", key="api_key:1"): (3, 3)}
    with monkeypatch.context() as patched:
        patched.setattr(totals, "_declare_gap", ends)
        with pytest.raises(KeyboardInterrupt):
            totals.write("p1", lost)
    assert not ProcessTotal.objects.exists()
    totals.write("p1", lost)
    assert DurabilityGap.objects.get().units == 3


def test_old_totals_of_what_was_admitted_are_added_up_over_processes() -> None:
    for process in ("p1", "p2", "p3"):
        totals.write(process, {total(): (2, 20), total("unanswered", key="k"): (1, 1)})
    assert totals.fold(BIN + 3600) == 0
    assert totals.fold(BIN + 2 * 86_400) == 2
    assert totals.fold(BIN + 2 * 86_400) == 0
    assert {row for row in written() if row[1] == "admitted"} == {("", "admitted", 6, 60)}
    assert ProcessTotal.objects.filter(kind="unanswered").count() == 3


def test_the_command_that_compacts_adds_up_old_totals_of_processes() -> None:
    for process in ("p1", "p2"):
        totals.write(process, {total(start=BIN - 400 * 86_400): (2, 20)})
    call_command("ratelimits_compact", stdout=io.StringIO())
    assert written() == {("", "admitted", 4, 40)}


def test_only_what_has_grown_is_written_again(django_assert_num_queries: Callable[[int], Any]) -> None:
    process_totals._forget_all()
    now = int(time.time()) * 1_000_000
    for account in ("account:acme", "account:other"):
        process_totals.admitted(account, {"requests": 1, "tokens": 5}, now)
    process_totals.write()
    with django_assert_num_queries(0):
        process_totals.write()
    process_totals.admitted("account:acme", {"tokens": 7}, now)
    ProcessTotal.objects.update(units=0)
    process_totals.write()
    rows = ProcessTotal.objects.order_by("account", "meter").values_list("account", "meter", "requests", "units")
    assert list(rows) == [
        ("acme", "requests", 1, 0), ("acme", "tokens", 2, 12), ("other", "requests", 1, 0), ("other", "tokens", 1, 0),
    ]  # fmt: skip
    process_totals._forget_all()


def test_what_could_not_be_written_is_written_the_next_time() -> None:
    process_totals._forget_all()
    process_totals.admitted("account:acme", {"requests": 1}, int(time.time()) * 1_000_000)
    with (
        override_settings(RATELIMITS={**settings.RATELIMITS, "DATABASE": "nowhere"}),
        pytest.raises(ImproperlyConfigured),
    ):
        process_totals.write()
    process_totals.write()
    assert ProcessTotal.objects.get().requests == 1
    process_totals._forget_all()


def test_a_process_keeps_no_total_that_is_complete_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    process_totals._forget_all()
    monkeypatch.setattr(process_totals, "_forgotten_before", 0)
    start = int(time.time()) // 900 * 900
    now = start - 3 * 900
    monkeypatch.setattr(time, "time", lambda: now)
    process_totals.admitted("account:acme", {"requests": 1}, now * 1_000_000)
    now = start
    process_totals.admitted("account:acme", {"requests": 1}, now * 1_000_000)
    process_totals.write()
    assert [place.bin for place in process_totals.totals()] == [start]
    now = start - 3 * 900
    process_totals.admitted("account:acme", {"requests": 1}, now * 1_000_000)
    process_totals.write()
    # A forgotten bin does not start again: its total would replace the one that was written.
    assert sum(ProcessTotal.objects.values_list("requests", flat=True)) == 3
    process_totals._forget_all()
