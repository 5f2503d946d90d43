from __future__ import annotations

import pytest
from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from ratelimits.models import Account
from ratelimits.models.customers import make_missing
from ratelimits.usage.models import Alert, AlertChannel, AlertDelivery
from tests.support.customers import present

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def staff() -> Client:
    client = Client()
    client.force_login(get_user_model().objects.create_superuser(username="root"))
    return client


def failed_delivery() -> AlertDelivery:
    make_missing("default", ["acme"])
    acme = present("default", ["acme"])["acme"]
    alert = Alert.objects.create(
        id=Alert.id_of(acme.token, 0, "requests", 1, 50, 100),
        customer=acme,
        account="acme",
        meter="requests",
        rule=1,
        period=0,
        period_end=1,
        threshold=50,
        basis="limit",
        used=5,
        quantity=10,
    )
    name = AlertDelivery.id_of(alert.pk, "webhook", None)
    return AlertDelivery.objects.create(
        id=name, alert=alert, kind="webhook", state="failed", attempts=16, due_at=timezone.now(), error="<it> failed"
    )


def test_a_channel_is_made_in_the_admin_with_a_secret_of_its_own(staff: Client) -> None:
    account = Account.objects.create(identifier="acme")
    page = reverse("admin:ratelimits_usage_alertchannel_add")
    secret = staff.get(page).context["adminform"].form["secret"].value()
    values = {"account": account.pk, "webhook_url": "https://example.com/a", "secret": secret, "active": "on"}
    assert staff.post(page, values).status_code == 302
    assert AlertChannel.objects.get().secret == secret


def test_a_secret_is_kept_or_replaced_but_not_shown_again(staff: Client) -> None:
    channel = AlertChannel.objects.create(account=Account.objects.create(identifier="acme"), email="a@example.com")
    page, kept = reverse("admin:ratelimits_usage_alertchannel_change", args=[channel.pk]), channel.secret
    values = {"account": channel.account.pk, "email": "b@example.com", "secret": "", "active": "on"}
    assert kept not in staff.get(page).content.decode()
    assert staff.post(page, values).status_code == 302
    channel.refresh_from_db()
    assert (channel.email, channel.secret) == ("b@example.com", kept)
    refused = staff.post(page, {**values, "secret": "letmein"})
    assert (refused.status_code, "letmein" in refused.content.decode().partition("<form")[2]) == (200, False)
    replaced = "whsec_" + "QUJD" * 8
    assert staff.post(page, {**values, "secret": replaced}).status_code == 302
    channel.refresh_from_db()
    assert channel.secret == replaced


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({}, "__all__"),
        ({"email": "nobody"}, "email"),
        ({"webhook_url": "file:///etc/passwd"}, "webhook_url"),
        ({"webhook_url": "https://example.com", "secret": "letmein"}, "secret"),
        ({"webhook_url": "https://example.com", "secret": "whsec_c2hvcnQ="}, "secret"),
    ],
)
def test_a_channel_that_leads_nowhere_is_refused_at_its_field(values: dict[str, str], field: str) -> None:
    channel = AlertChannel(account=Account.objects.create(identifier="acme"), **values)
    with pytest.raises(ValidationError) as refused:
        channel.full_clean()
    assert list(refused.value.message_dict) == [field]


def test_alerts_and_deliveries_are_read_not_written(staff: Client) -> None:
    delivery = failed_delivery()
    for name, row in (("alert", delivery.alert), ("alertdelivery", delivery)):
        assert staff.get(reverse(f"admin:ratelimits_usage_{name}_changelist")).status_code == 200
        page = staff.get(reverse(f"admin:ratelimits_usage_{name}_change", args=[row.pk]))
        assert page.status_code == 200
        assert "&lt;it&gt; failed" in page.content.decode()
        assert staff.get(reverse(f"admin:ratelimits_usage_{name}_add")).status_code == 403


def test_what_was_given_up_is_made_due_again_by_an_action(staff: Client) -> None:
    delivery = failed_delivery()
    page = reverse("admin:ratelimits_usage_alertdelivery_changelist")
    staff.post(page, {"action": "again", "_selected_action": [str(delivery.pk)]})
    delivery.refresh_from_db()
    assert (delivery.state, delivery.attempts) == ("waiting", 0)
