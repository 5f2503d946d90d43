from __future__ import annotations

from datetime import timedelta

import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction

from ratelimits import moments
from ratelimits.models import Access, Tombstone

pytestmark = pytest.mark.django_db


def access(target: str = "user:1", **fields: object) -> Access:
    row = Access(target=target, reason="abuse", **fields)
    row.full_clean()
    row.save()
    return row


def test_a_row_is_versioned_and_has_a_history() -> None:
    row = access("203.0.113.0/24")
    assert (row.target, row.version > 0) == ("ip:203.0.113.0/24", True)
    row.end("a mistake")
    last = row.history.latest()
    assert (last.history_change_reason, last.version) == ("a mistake", row.version)
    assert not row.in_force(moments.now())


def test_writes_without_a_form_keep_the_one_form_of_a_target() -> None:
    Access.objects.create(target="203.0.113.9/32", reason="r")
    assert Access.objects.get().target == "ip:203.0.113.9"
    Access.objects.update(target="2001:DB8::/32")
    assert Access.objects.get().target == "ip:2001:db8::/32"
    assert Tombstone.objects.get().key == "ip:203.0.113.9"


def test_only_one_row_of_a_target_is_in_force_at_a_time() -> None:
    now = moments.now()
    first = access(valid_until=now + timedelta(hours=1))
    with pytest.raises(ValidationError, match=r"“block user:1” .* is in force at the same time"):
        access(effect="allow")
    access(effect="allow", valid_from=now + timedelta(hours=1))
    first.end("over")
    access(valid_until=now + timedelta(minutes=5))


@pytest.mark.parametrize(
    "wrong",
    [{"effect": "maybe"}, {"status": 200}, {"valid_until": moments.now() - timedelta(days=9)}],
)
def test_the_database_refuses_what_makes_no_sense(wrong: dict[str, object]) -> None:
    row = access(valid_from=moments.now())
    with pytest.raises(IntegrityError), transaction.atomic():
        Access.objects.filter(pk=row.pk).update(**wrong)


def test_a_row_that_has_not_begun_is_deleted_by_its_end() -> None:
    row = access(valid_from=moments.now() + timedelta(days=1))
    row.end("not needed")
    assert not Access.objects.exists()
    assert Access.history.latest().history_change_reason == "not needed"
