"""Test that each admin page works in a project with `USE_TZ=False`, in a time zone west of UTC."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from django.db import models
from django.test import Client

from ratelimits import moments
from ratelimits.admin.typed import local_time
from ratelimits.billing.models import PushReceiver
from ratelimits.models import Access, KeyOverride
from ratelimits.usage.models import Batch
from tests.admin.test_access import CASES, address, page_of, row_of
from tests.admin.test_usage import text, url
from tests.support.rows import rule

pytestmark = pytest.mark.django_db
NOON = datetime(2026, 7, 1, 12, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _naive(settings: Any) -> None:
    settings.TIME_ZONE, settings.USE_TZ = "America/Los_Angeles", False


def dated(row: Any) -> Any:
    """Fill in all moments of a row: noon. The row is in force today."""
    names = [field.name for field in row._meta.concrete_fields if isinstance(field, models.DateTimeField)]
    values = {name: NOON.replace(year=2126) if name == "valid_until" else NOON for name in names}
    row._meta.model._base_manager.filter(pk=row.pk).update(**values)
    row.refresh_from_db()
    return row


@pytest.mark.parametrize(("model", "name"), CASES, ids=lambda case: case if isinstance(case, str) else case.__name__)
def test_a_page_shows_a_row_with_all_moments(model: type[models.Model], name: str, admin_client: Client) -> None:
    row = dated(row_of(model))
    if name == "enforce":
        model._default_manager.filter(pk=row.pk).update(mode="shadow")
    response = admin_client.get(address(model, name, row) + page_of(model, name).query)
    everything = frozenset({"view", "add", "change", "delete", "finalise"})
    assert response.status_code == (200 if page_of(model, name).get(everything) else 403)


def test_lists_and_forms_show_the_projects_time_zone(admin_client: Client) -> None:
    receiver = dated(PushReceiver.objects.create(name="stripe"))
    batch = dated(row_of(Batch))
    for row in (receiver, batch):
        for page in (url(type(row)), url(type(row), "change", row.pk)):
            assert "2026-07-01 05:00 PDT" in text(admin_client.get(page))


def test_a_form_that_is_sent_again_changes_no_moment(admin_client: Client) -> None:
    rule("burst")
    row = dated(KeyOverride.objects.create(key="user:1", rule="burst", capacity=7))
    address = url(KeyOverride, "change", row.pk)
    form = admin_client.get(address).context["adminform"].form
    values = {name: "" if value is None else value for name, value in form.initial.items()}
    parts = {"valid_from_0": "2026-07-01", "valid_from_1": "05:00:00"}
    assert str(form["valid_from"]).count('value="2026-07-01"') == 1
    later = {"valid_until_0": "2126-07-01", "valid_until_1": "05:00:00"}
    assert admin_client.post(address, {**values, **parts, **later, "capacity": "8"}).status_code == 302
    row.refresh_from_db()
    assert (row.capacity, row.valid_from) == (8, NOON)


def test_the_inspector_and_the_history_show_local_times(admin_client: Client) -> None:
    block = Access.objects.create(target="user:1", reason="r", valid_from=NOON)
    block.history.update(history_date=NOON)
    assert "2026-07-01 05:00 PDT" in text(admin_client.get("/admin/ratelimits/inspect/?q=user:1&account=-"))
    assert "July 1, 2026, 5 a.m." in text(admin_client.get(url(Access, "history", block.pk)))
    assert local_time(block.valid_from) == moments.local_text(NOON)
