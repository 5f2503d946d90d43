from __future__ import annotations

from collections.abc import Callable

import pytest
from django.db.models import F

from ratelimits.usage.ledger.packet import canonical, checksum
from ratelimits.usage.ledger.verify.ledger import verify_ledger
from ratelimits.usage.models import Batch, Line
from ratelimits.usage.models.ledger import COUNTERS, SUBJECT
from tests.support.usage.traffic import flow, use

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _three_batches() -> None:
    for cost in (1, 20, 300):
        use(cost=cost)
        use(key="api_key:2")
        flow()


def findings() -> list[str]:
    return list(verify_ledger("default"))


def test_what_nobody_touched_holds() -> None:
    assert findings() == []


def second_batch() -> Batch:
    return Batch.objects.get(position=2)


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        (lambda: second_batch().lines()[:1].get().delete(), "was written with 2 lines, but has 1"),
        (lambda: Line.objects.filter(admitted_units=20).update(admitted_units=21), "was changed after it was written"),
        (
            lambda: Line.objects.filter(admitted_units=20).update(key="api_key:3"),
            "acme api_key:3 requests",
        ),
        (lambda: Batch.objects.filter(position=2).update(cum=F("cum") + 1), "do not match its digest"),
        (lambda: Batch.objects.filter(position=2).delete(), "positions 2 to 2"),
        (lambda: Batch.objects.filter(position=1).delete(), "begins at position 2, not at 1"),
        (
            lambda: Batch.objects.filter(position=1).delete(),
            "begins the chain, but continues the digest of an earlier batch",
        ),
        (
            lambda: Line.objects.filter(admitted_units=20).update(batch_id=10**6),
            "names batch row 1000000, but has the primary key of a line of batch row",
        ),
        (lambda: Batch.objects.filter(position=2)._raw_delete("default"), "which does not exist"),
        (lambda: Batch.objects.filter(position=2).update(digest="0" * 64), "does not match its content"),
    ],
)
def test_whatever_is_changed_is_found_and_named(damage: Callable[[], object], finding: str) -> None:
    damage()
    assert any(finding in found for found in findings()), findings()


def test_a_line_changed_with_its_checksum_is_found_by_its_batch() -> None:
    line = Line.objects.get(admitted_units=20)
    line.admitted_units = 21
    line.checksum = checksum(canonical([getattr(line, name) for name in (*SUBJECT, *COUNTERS)]))
    line.save()
    first, second = findings()
    assert "do not match its digest" in first
    assert "but it ends with the running sum" in second
