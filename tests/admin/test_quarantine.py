from __future__ import annotations

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client

from ratelimits.usage.models import Line, QuarantinedBatch, ShardState
from tests.admin.test_usage import text, url
from tests.support.usage.quarantine import Fork

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fsync_at_once")]

QUARANTINE = "/admin/ratelimits_usage/quarantinedbatch/"


@pytest.mark.parametrize(("action", "units", "says"), [("discard", 3, "discarded by admin"), ("accept", 5, "accepted")])
def test_what_is_in_quarantine_is_resolved_by_an_action_that_says_who_did_it(
    admin_client: Client,
    admin_user: User,
    fork: Fork,
    action: str,
    units: int,
    says: str,
) -> None:
    kept = fork(5)
    page = text(admin_client.get(url(QuarantinedBatch, "change", kept.pk)))
    assert "acme api_key:1: 2 requests" in page
    chosen = {"action": action, "_selected_action": [kept.pk]}
    asked = text(admin_client.post(QUARANTINE, chosen))
    assert "acme api_key:1: 2 requests" in asked
    assert "cannot be undone" in asked
    kept.refresh_from_db()
    assert kept.resolved_at is None, "it was only shown what would be done"
    chosen["post"] = "yes"
    answer = admin_client.post(QUARANTINE, chosen, follow=True)
    assert says in text(answer)
    assert sum(Line.objects.values_list("admitted_units", flat=True)) == units
    assert not ShardState.objects.filter(frozen=True).exists()
    entry = LogEntry.objects.get(user=admin_user)
    assert says in entry.get_change_message()
    again = admin_client.post(QUARANTINE, chosen, follow=True)
    assert "was resolved already" in text(again)


def test_a_batch_is_accepted_if_each_request_is_a_transaction(
    admin_client: Client, fork: Fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    chosen = {"action": "accept", "_selected_action": [fork(5).pk], "post": "yes"}
    assert "accepted" in text(admin_client.post(QUARANTINE, chosen, follow=True))


def test_who_may_only_look_at_the_quarantine_may_not_resolve_it(client: Client, fork: Fork) -> None:
    kept = fork(5)
    viewer = User.objects.create(username="viewer", is_staff=True)
    viewer.user_permissions.add(Permission.objects.get(codename="view_quarantinedbatch"))
    client.force_login(viewer)
    assert "acme api_key:1" in text(client.get(url(QuarantinedBatch, "change", kept.pk)))
    client.post(QUARANTINE, {"action": "accept", "_selected_action": [kept.pk], "post": "yes"})
    kept.refresh_from_db()
    assert kept.resolved_at is None
    viewer.user_permissions.add(Permission.objects.get(codename="resolve"))
    client.post(QUARANTINE, {"action": "accept", "_selected_action": [kept.pk], "post": "yes"})
    kept.refresh_from_db()
    assert kept.resolution.startswith("accepted by viewer")
