"""Test that verify finds nothing wrong while usage is drained, reports closed, and batches joined and archived.

Each of these happens before one query of the verification, and the next time before another one.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.test import override_settings

from ratelimits.billing.models import Report
from ratelimits.billing.reports.closing.close import finalise
from ratelimits.usage.ledger.drain import drain
from ratelimits.usage.ledger.retention.compact import compact
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.ledger.tally import tally
from ratelimits.usage.models import Batch, ShardState
from tests.billing.reports.closing.test_close import adjust
from tests.billing.reports.verify.test_report import SIGNED
from tests.support.reports.invoices import account, close, spend
from tests.support.usage.traffic import at, flow

pytestmark = pytest.mark.django_db

#: How many queries are tried for each kind of change without `--long`.
_SAMPLE = 8


def drained(_directory: Path) -> None:
    before = Batch.objects.count()
    spend("acme", "2026-10-16", 3)
    seal()
    drain()
    tally()
    assert Batch.objects.count() > before


def closed(_directory: Path) -> None:
    assert finalise(at("2026-11-02"))


def closed_again(_directory: Path) -> None:
    """Close a further version of a report, with an adjustment."""
    adjust(-5, "2026-09-01")
    assert finalise(at("2026-11-02"))


def joined(_directory: Path) -> None:
    assert list(compact())


def archived(directory: Path) -> None:
    call_command("ratelimits_archive", directory, before="2026-10", stdout=io.StringIO())


CHANGES: dict[str, Callable[[Path], None]] = {
    each.__name__: each for each in (drained, closed, closed_again, joined, archived)
}


def queries() -> int:
    """Verify; return how many queries it took."""
    counted = 0

    def count(execute: Any, *query: Any) -> Any:
        nonlocal counted
        counted += 1
        return execute(*query)

    with connection.execute_wrapper(count):
        verify()
    return counted


def verify() -> str:
    out = io.StringIO()
    try:
        call_command("ratelimits_verify", "--all", stdout=out, stderr=io.StringIO())
    except CommandError:
        return out.getvalue()
    return ""


def verify_beside(change: Callable[[], object], number: int) -> str:
    """Verify, make a change before one of the queries, and return the findings."""
    left = number

    def changing(execute: Any, *query: Any) -> Any:
        nonlocal left
        left -= 1
        if left == -1:
            change()
        return execute(*query)

    with connection.execute_wrapper(changing):
        return verify()


@pytest.mark.parametrize("kind", CHANGES)
def test_what_changes_beside_it_is_no_finding(kind: str, tmp_path: Path, fsync_at_once: None, long_run: bool) -> None:
    with override_settings(RATELIMITS={**SIGNED, "RECEIPT_TTL": 10 * 365 * 86_400, "SHARDS": 2}):
        acme = account(included=10)
        for day in ("2026-09-05", "2026-09-06"):
            spend(acme, day, 7)
            flow()
        close("2026-10-02")
        for key in ("api_key:1", "api_key:2"):
            spend(acme, "2026-10-15", 7, key=key)
            flow()
        ShardState.objects.update(watermark=at("2027-01-01" if kind == "joined" else "2026-11-02"))
        assert verify() == ""
        count = queries()
        numbers = range(count) if long_run else sorted(Random(7).sample(range(count), _SAMPLE))
        for number in numbers:
            savepoint = transaction.savepoint()
            found = verify_beside(partial(CHANGES[kind], tmp_path / str(number)), number)
            # The missing batches are said to be in an archive that is not at hand.
            wrong = [line for line in found.splitlines() if "verify with this archive" not in line]
            assert wrong == [], f"{kind} before query {number} of {count}"
            transaction.savepoint_rollback(savepoint)
        assert Report.objects.count() == 1
