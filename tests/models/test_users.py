"""Test rows that name a user who is deleted, in one database."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db.models import ProtectedError
from django.utils import timezone

from ratelimits.billing.models import Adjustment
from ratelimits.models import Rule
from tests.support.rows import unsaved

pytestmark = pytest.mark.django_db


def test_whoever_made_an_adjustment_cannot_be_deleted() -> None:
    author, other = (User.objects.create(username=name) for name in ("author", "other"))
    made = Adjustment.objects.create(
        account="acme", period_start=timezone.now(), quantity=1, reason="goodwill", author=author
    )
    with pytest.raises(ProtectedError, match=r"Adjustment\.author") as caught:
        User.objects.all().delete()
    assert caught.value.protected_objects == {made}
    other.delete()
    assert User.objects.get() == author


def test_a_record_of_the_history_outlives_its_user() -> None:
    user, other = (User.objects.create(username=name) for name in ("user", "other"))
    for name, by in (("a", user), ("b", other)):
        row: Any = unsaved(name)
        row._history_user = by
        row.save()
    user.delete()
    assert [record.history_user for record in Rule.history.order_by("name")] == [None, other]
