from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from celery.contrib.testing.worker import start_worker
from celery.signals import setup_logging
from django.conf import settings
from django.test import override_settings

from project.celery import app
from ratelimits.models import Account, ConfigVersion, Plan, PlanInclusion
from ratelimits.usage import tasks
from ratelimits.usage.models import Alert, AlertChannel, AlertDelivery
from tests.support.usage.traffic import flow, use
from tests.usage.alerts.conftest import Receiver

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def _logging_left_alone() -> Iterator[None]:
    """Restore the root logger's level, which a worker in this process changes for all later tests."""

    def leave(**kwargs: object) -> None:
        pass

    setup_logging.connect(leave)
    yield
    setup_logging.disconnect(leave)


@pytest.mark.usefixtures("_logging_left_alone")
def test_a_worker_raises_alerts_and_delivers_them(receiver: Receiver, signalled: list[Alert]) -> None:
    plan = Plan.objects.create(name="Pro", slug="pro")
    PlanInclusion.objects.create(plan=plan, meter="requests", quantity=100)
    owner = Account.objects.create(identifier="acme", plan=plan)
    AlertChannel.objects.create(account=owner, webhook_url=receiver.url)
    use(cost=90, now=None, configuration=ConfigVersion.read("default")[0])
    flow()
    with start_worker(app, pool="solo", perform_ping_check=False):
        tasks.alerts.delay()
        tasks.alerts.delay()
        deadline = time.monotonic() + 30
        while AlertDelivery.objects.filter(state="done").count() < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
    assert sorted(received.json["data"]["threshold"] for received in receiver.received) == [50, 80]
    assert sorted(alert.threshold for alert in signalled) == [50, 80]


def test_the_schedule_has_its_interval() -> None:
    with override_settings(RATELIMITS={**settings.RATELIMITS, "ALERT_INTERVAL": 7}):
        assert tasks.beat_schedule()["ratelimits.alerts"]["schedule"] == 7
