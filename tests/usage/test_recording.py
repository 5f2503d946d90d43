"""Test which requests are recorded, and that the table stays small."""

from __future__ import annotations

import asyncio
import io
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
from django.core.management import call_command
from django.db import OperationalError, connection

from ratelimits.answers.answer import Answer
from ratelimits.identity import Identity
from ratelimits.models import Access
from ratelimits.quota.costs import ONE_REQUEST
from ratelimits.quota.waiting import acheck_and_wait, check_and_wait
from ratelimits.usage import recording
from ratelimits.usage.ledger.retention import compact as compacting
from ratelimits.usage.models import RecordedRequest
from ratelimits.usage.tasks import compact
from tests.support import forked
from tests.support.rows import rule
from tests.support.servers import TestServers

pytestmark = pytest.mark.django_db(transaction=True)
WHO = Identity("user:1", "api_key:9", "account:acme", "ip:203.0.113.9")
SECOND = 1_000_000


@pytest.fixture(autouse=True)
def _nothing_waits() -> Iterator[None]:
    recording.clear()
    yield
    recording.clear()


def on(settings: Any, **more: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "RECORD_SAMPLE": 1, **more}


def record(account: str = "acme", requests: int = 1) -> None:
    for _ in range(requests):
        recording.record(Identity(account=f"account:{account}"), "*", "GET", {"requests": 1}, refused=False)


def check(who: Identity, scope: str = "*", method: str = "", costs: Mapping[str, int] = ONE_REQUEST) -> Answer:
    return check_and_wait(who, scope, method, costs)


async def acheck(who: Identity) -> Answer:
    return await acheck_and_wait(who, "*", "", ONE_REQUEST)


def test_nothing_is_recorded_unless_the_project_asks_for_it() -> None:
    check(WHO)
    asyncio.run(acheck(WHO))
    recording.write()
    assert not RecordedRequest.objects.exists()


def test_a_request_is_recorded_with_its_keys_and_costs(settings: Any) -> None:
    on(settings)
    before, costs = time.time_ns() // 1000, {"requests": 1, "tokens": 250}
    check(WHO, "search", "POST", costs)
    costs["tokens"] = 7  # the view's own mapping
    asyncio.run(acheck(Identity(address="ip:198.51.100.7")))
    recording.write()
    first, second = RecordedRequest.objects.order_by("pk")
    assert before <= first.at <= second.at <= time.time_ns() // 1000
    assert (first.user, first.api_key, first.account, first.address) == WHO[:4]
    assert (first.scope, first.method, first.costs) == ("search", "POST", {"requests": 1, "tokens": 250})
    assert (second.user, second.account, second.address) == ("", "", "ip:198.51.100.7")
    assert (second.scope, second.method, second.costs) == ("*", "", {"requests": 1})
    assert str(first).startswith("api_key:9 search 20")


def test_a_request_is_recorded_as_refused_if_a_rule_a_repetition_or_a_block_refused_it(settings: Any) -> None:
    on(settings)
    rule("slow", capacity=1, rate="0.000001")
    assert [check(WHO).allowed for _ in range(3)] == [True, False, False]
    Access.objects.create(target="account:acme", effect="block", reason="x")
    assert not check(WHO).allowed
    assert not asyncio.run(acheck(WHO)).allowed
    assert check(Identity("user:2")).allowed
    recording.write()
    refused = RecordedRequest.objects.order_by("pk").values_list("refused", flat=True)
    assert list(refused) == [False, True, True, True, True, False]


def test_all_requests_of_an_account_are_recorded_or_none(settings: Any) -> None:
    on(settings, RECORD_SAMPLE=0.5)
    for number in range(200):
        record(f"number {number}", requests=3)
        recording.record(
            Identity(user=f"user:{number}", address="ip:203.0.113.9"), "*", "GET", {"requests": 1}, refused=False
        )
    recording.write()
    of_account = Counter(RecordedRequest.objects.exclude(account="").values_list("account", flat=True))
    assert set(of_account.values()) == {3}
    assert 70 < len(of_account) < 130
    assert 70 < RecordedRequest.objects.exclude(user="").count() < 130


def test_text_that_a_database_cannot_store_is_recorded_under_its_ledger_name(settings: Any) -> None:
    on(settings)
    check(WHO, "a\0" + "b" * 400, "X" * 50, {"tokens": 1})
    recording.write()
    row = RecordedRequest.objects.get()
    assert len(row.scope) < 256
    assert "\0" not in row.scope
    assert (row.method, row.costs) == ("X" * 20, {"tokens": 1})


def test_requests_that_cannot_wait_are_counted(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on(settings)
    monkeypatch.setattr(recording, "MAX_UNWRITTEN", 2)
    record(requests=7)
    recording.write()
    record()
    recording.write()
    assert list(RecordedRequest.objects.order_by("pk").values_list("left_out", flat=True)) == [5, 0, 0]


def test_requests_that_could_not_be_written_are_counted(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on(settings)
    with monkeypatch.context() as patch:
        patch.setattr(connection, "ensure_connection", _fail)
        connection.close()
        for requests in (3, 2):
            record(requests=requests)
            with pytest.raises(OperationalError):
                recording.write()
    record()
    recording.write()
    assert list(RecordedRequest.objects.values_list("left_out", flat=True)) == [5]


def test_requests_are_not_stored_and_counted_as_lost_too(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows can be written, but the oldest rows cannot be deleted."""
    on(settings)
    record(requests=3)
    with monkeypatch.context() as patch:
        patch.setattr(recording, "_trim", lambda using: _fail())
        with pytest.raises(OperationalError):
            recording.write()
    record()
    recording.write()
    assert list(RecordedRequest.objects.values_list("left_out", flat=True)) == [3]


def test_a_number_that_the_column_cannot_store_becomes_the_largest_one() -> None:
    recording.write_rows([(SECOND, WHO, "*", "GET", {"requests": 1}, False)], left_out=2**40)
    assert RecordedRequest.objects.get().left_out == 2**31 - 1


def test_old_requests_are_deleted_also_if_the_ledger_cannot_be_compacted(monkeypatch: pytest.MonkeyPatch) -> None:
    recording.write_rows([(SECOND, WHO, "*", "GET", {"requests": 1}, False)])
    monkeypatch.setattr(compacting, "compact", lambda progress: _fail())
    with pytest.raises(OperationalError):
        compact()
    assert not RecordedRequest.objects.exists()


def _fail() -> None:
    raise OperationalError("away")


def test_the_oldest_rows_are_deleted_above_the_maximum(settings: Any) -> None:
    on(settings, RECORD_ROWS=10)
    for number in range(5):
        record(f"number {number}", requests=4)
        recording.write()
        assert RecordedRequest.objects.count() <= 10
    assert RecordedRequest.objects.order_by("pk").values_list("account", flat=True)[0] == "account:number 2"


@pytest.mark.parametrize("compacts", [compact, partial(call_command, "ratelimits_compact", stdout=io.StringIO())])
def test_the_periodic_task_and_the_command_delete_old_rows(settings: Any, compacts: Callable[[], object]) -> None:
    on(settings, RECORD_SECONDS=3_600)
    now = time.time_ns() // 1000
    ages = {"older": 3_700, "newer": 3_500}
    recording.write_rows(
        [(now - age * SECOND, Identity(user=name), "*", "", {"requests": 1}, False) for name, age in ages.items()]
    )
    compacts()
    assert list(RecordedRequest.objects.values_list("user", flat=True)) == ["newer"]
    settings.RATELIMITS = {**settings.RATELIMITS, "RECORD_ROWS": 1}
    recording.write_rows([(now, WHO, "*", "", {"requests": 1}, False)])
    assert recording.expire(time.time()) == 0
    assert RecordedRequest.objects.count() == 1


RECORDS_AND_ENDS = """
import django
from django.conf import settings
settings.RATELIMITS["RECORD_SAMPLE"] = 1
django.setup()
from ratelimits.identity import Identity
from ratelimits.quota.waiting import check_and_wait
check_and_wait(Identity("user:1"), "*", "GET", {"requests": 1})
"""


def test_a_process_writes_in_a_thread_and_when_it_ends(servers: TestServers) -> None:
    database = servers.url_of_database(str(connection.settings_dict["NAME"]))
    environment = {**os.environ, "DATABASE_URL": database}
    forked.run([sys.executable, "-c", RECORDS_AND_ENDS], env=environment, check=True)
    assert list(RecordedRequest.objects.values_list("user", "left_out")) == [("user:1", 0)]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_write_the_requests_of_its_parent(settings: Any) -> None:
    on(settings)
    record()
    child = os.fork()
    if child == 0:
        os._exit(len(recording._unwritten))
    assert os.waitpid(child, 0)[1] == 0
    assert len(recording._unwritten) == 1
