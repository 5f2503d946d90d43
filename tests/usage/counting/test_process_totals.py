"""Test how a process records requests that Redis did not count, or may not have counted."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection

from ratelimits.usage.counting import process_totals
from ratelimits.usage.counting.process_totals import TotalKey
from ratelimits.usage.models import ProcessTotal
from tests.support import forked
from tests.support.servers import TestServers


@pytest.fixture(autouse=True)
def _no_totals() -> Iterator[None]:
    process_totals._forget_all()
    yield
    process_totals._forget_all()


def start() -> int:
    return int(time.time()) // 900 * 900


def test_totals_are_requests_and_units_by_place_and_only_grow() -> None:
    bin_start = start()
    process_totals.add("unmetered", "acme", "api_key:1", {"requests": 1, "tokens": 250})
    process_totals.add("unmetered", "acme", "api_key:1", {"requests": 1, "tokens": 50})
    process_totals.add("unanswered", "acme", "api_key:1", {"requests": 1})
    process_totals.add("unmetered", "", "anonymous", {"requests": 3})
    assert process_totals.totals() == {
        TotalKey("unmetered", "acme", "api_key:1", "requests", bin_start): (2, 2),
        TotalKey("unmetered", "acme", "api_key:1", "tokens", bin_start): (2, 300),
        TotalKey("unanswered", "acme", "api_key:1", "requests", bin_start): (1, 1),
        TotalKey("unmetered", "", "anonymous", "requests", bin_start): (1, 3),
    }
    assert process_totals.totals() == process_totals.totals()


def test_a_total_is_of_a_quarter_of_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    for moment in (899.9, 900.0, 1799.9):
        monkeypatch.setattr(time, "time", lambda moment=moment: moment)
        process_totals.add("unanswered", "acme", "user:1", {"requests": 1})
    assert {place.bin: counts for place, counts in process_totals.totals().items()} == {0: (1, 1), 900: (2, 2)}


def test_threads_lose_nothing() -> None:
    def work() -> None:
        for _ in range(500):
            process_totals.add("unmetered", "acme", "user:1", {"requests": 1})

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(requests for requests, _units in process_totals.totals().values()) == 4000


def in_a_child(work: Any) -> str:
    """Return the result of a forked child."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking while threads run is what this test is about
        child = os.fork()
    if child == 0:
        try:
            os.write(writing, str(work()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        return pipe.read()


def test_a_forked_child_is_another_process_with_totals_of_its_own() -> None:
    process_totals.add("unmetered", "acme", "user:1", {"requests": 1})
    mine = process_totals.process()

    def work() -> str:
        before = len(process_totals.totals())
        process_totals.add("unmetered", "acme", "user:1", {"requests": 1})
        return f"{process_totals.process()} {before} {len(process_totals.totals())}"

    theirs, before, after = in_a_child(work).split()
    assert theirs != mine == process_totals.process()
    assert (before, after) == ("0", "1")


def test_a_child_forked_while_another_thread_counts_can_count() -> None:
    holding, done = threading.Event(), threading.Event()

    def hold() -> None:
        with process_totals._lock:
            holding.set()
            done.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    holding.wait(10)
    try:

        def work() -> int:
            counting = threading.Thread(
                target=process_totals.add, args=("unmetered", "a", "k", {"requests": 1}), daemon=True
            )
            counting.start()
            counting.join(5)
            return int(counting.is_alive())

        assert in_a_child(work) == "0"
    finally:
        done.set()
        thread.join()


COUNTS_AND_ENDS = """
import django
from django.conf import settings
settings.RATELIMITS["PROCESS_TOTALS_INTERVAL"] = 3600
django.setup()
from ratelimits.usage.counting import process_totals
process_totals.add("unmetered", "acme", "api_key:1", {"requests": 1})
"""


@pytest.mark.django_db(transaction=True)
def test_a_process_that_ends_before_its_first_writing_writes_then(servers: TestServers) -> None:
    database = servers.url_of_database(str(connection.settings_dict["NAME"]))
    environment = {**os.environ, "DATABASE_URL": database}
    forked.run([sys.executable, "-c", COUNTS_AND_ENDS], env=environment, check=True)
    assert list(ProcessTotal.objects.values_list("kind", "key", "requests")) == [("unmetered", "api_key:1", 1)]


@pytest.mark.django_db(transaction=True)
def test_a_process_that_met_many_accounts_goes_on_under_another_name_and_no_total_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ratelimits.usage.ledger import process_totals as totals

    monkeypatch.setattr(process_totals, "MAX_WRITTEN", 10)
    before, now = process_totals.process(), int(time.time()) * 1_000_000

    def write(process: str, found: process_totals.Totals) -> None:
        totals.write(process, found)
        # Requests counted during the write are not written yet.
        process_totals.add("unmetered", "acme", "user:1", {"requests": 2})
        process_totals.add("unmetered", "late", "user:1", {"requests": 3})

    monkeypatch.setattr(process_totals, "_write", write)
    for number in range(20):
        process_totals.admitted(f"account:{number}", {"requests": 1}, now)
    process_totals.add("unmetered", "acme", "user:1", {"requests": 1})
    process_totals.write()
    assert process_totals.process() != before
    monkeypatch.setattr(process_totals, "_write", totals.write)
    process_totals.admitted("account:3", {"requests": 1}, now)
    assert len(process_totals.totals()) == 3
    process_totals.write()
    rows = ProcessTotal.objects.order_by("process")
    assert sum(row.requests for row in rows if row.kind == "admitted") == 21
    sums = {name: [sum(r.requests for r in of), sum(r.units for r in of)] for name, of in by_account(rows).items()}
    assert (sums["3"], sums["acme"], sums["late"]) == ([2, 2], [2, 3], [1, 3])


def test_admitted_requests_with_the_same_costs_are_added_up_for_each_account_and_bin() -> None:
    now = start() * 1_000_000
    shared, other = {"requests": 1, "tokens": 5}, {"requests": 1, "tokens": 7}
    for account, costs, moment in [
        ("account:a", shared, now),
        ("account:a", shared, now + 1),
        ("account:a", other, now),
        ("account:b", shared, now),
        (None, shared, now),
        ("account:a", shared, now + 900_000_000),
    ]:
        process_totals.admitted(account, costs, moment)
    found = {(key.account, key.meter, key.bin - start()): value for key, value in process_totals.totals().items()}
    assert found == {
        ("a", "requests", 0): (3, 3),
        ("a", "tokens", 0): (3, 17),
        ("b", "requests", 0): (1, 1),
        ("b", "tokens", 0): (1, 5),
        ("", "requests", 0): (1, 1),
        ("", "tokens", 0): (1, 5),
        ("a", "requests", 900): (1, 1),
        ("a", "tokens", 900): (1, 5),
    }


def by_account(rows: Any) -> dict[str, list[ProcessTotal]]:
    found: dict[str, list[ProcessTotal]] = {}
    for row in rows:
        found.setdefault(row.account, []).append(row)
    return found


def test_totals_that_cannot_be_written_are_bounded_and_none_that_is_missing_from_the_ledger_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_totals, "MAX_UNWRITTEN", 10)
    for number in range(100):
        process_totals.admitted(f"account:{number}", {"requests": 1}, int(time.time()) * 1_000_000)
        process_totals.add("unmetered", str(number), f"user:{number}", {"requests": 2})
    found = process_totals.totals()
    assert len(found) <= 11
    assert sum(units for place, (_requests, units) in found.items() if place.kind == "unmetered") == 200


COUNTS_WITHOUT_TOTALS = """
import django
django.setup()
from ratelimits.usage.counting import process_totals
for number in range(30_000):
    process_totals.admitted(f"account:{number}", {"requests": 1}, number * 900_000_000)
    process_totals.add("unmetered", f"{number}", "api_key:1", {"requests": 1})
print(len(process_totals._new_admissions) + len(process_totals._totals))
"""


@pytest.mark.parametrize("interval", [0, 3600])
def test_totals_that_nobody_writes_are_not_kept(interval: int) -> None:
    setting = f"from django.conf import settings\nsettings.RATELIMITS['PROCESS_TOTALS_INTERVAL'] = {interval}\n"
    stop = "import os, sys; sys.stdout.flush(); os._exit(0)"  # without a last write
    done = forked.run(
        [sys.executable, "-c", setting + COUNTS_WITHOUT_TOTALS + stop],
        env={**os.environ, "DATABASE_URL": "sqlite:///:memory:"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert (int(done.stdout) == 0) == (interval == 0)
