"""Kill workers that raise and deliver alerts between any two steps: no alert may be lost or raised twice."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.core import mail
from django.utils import timezone

from ratelimits.models import Account, ConfigVersion, Plan, PlanInclusion
from ratelimits.usage.alerts import deliver
from ratelimits.usage.alerts.evaluate import evaluate
from ratelimits.usage.ledger import crash
from ratelimits.usage.models import Alert, AlertChannel, AlertDelivery
from tests.support.usage.traffic import NOON, flow, use
from tests.usage.alerts.conftest import Receiver

pytestmark = pytest.mark.django_db(transaction=True)

POINTS = (
    "alerts:alert-written",
    "alerts:deliveries-written",
    "alerts:committed",
    "alerts:evaluated",
    "alerts:due",
    "alerts:claimed",
    "alerts:sent",
    "alerts:marked",
)


class Killed(BaseException):
    """The simulated end of the process: no code of the app catches it, and the database rolls back."""


@pytest.fixture
def kill_at(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Return a dict to fill: for each point, how often it is passed before the process dies there."""
    left: dict[str, int] = {}

    def reached(point: str) -> None:
        if point in left:
            left[point] -= 1
            if left[point] < 0:
                del left[point]
                raise Killed

    monkeypatch.setattr(crash, "reached", reached)
    return left


def work(later: timedelta) -> None:
    evaluate(NOON)
    now = timezone.now() + later
    for name in deliver.due(now):
        deliver.deliver(name, now)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("passed", [0, 3])
def test_no_alert_is_lost_or_raised_twice(
    point: str, passed: int, kill_at: dict[str, int], receiver: Receiver, signalled: list[Alert]
) -> None:
    plan = Plan.objects.create(name="Pro", slug="pro")
    PlanInclusion.objects.create(plan=plan, meter="requests", quantity=100)
    for name in ("acme", "globex"):
        owner = Account.objects.create(identifier=name, plan=plan)
        AlertChannel.objects.create(account=owner, email=f"{name}@example.com", webhook_url=receiver.url)
        use(name, cost=300, configuration=ConfigVersion.read("default")[0])
    flow()
    kill_at[point] = passed
    deaths = 0
    for attempt in range(4):
        try:
            work(attempt * (deliver.CLAIM + timedelta(seconds=1)))
        except Killed:
            deaths += 1
    # An evaluation that raises alerts passes "alerts:evaluated" once; later evaluations find nothing new.
    assert deaths == (0 if (point, passed) == ("alerts:evaluated", 3) else 1)
    assert Alert.objects.count() == 6
    assert set(AlertDelivery.objects.values_list("state", flat=True)) == {"done"}
    assert AlertDelivery.objects.count() == 18
    ids = [received.headers["webhook-id"] for received in receiver.received]
    assert len(set(ids)) == 6
    # A delivery is sent twice only if the process died after sending and before recording it, and with the same id.
    arrived = len(ids) + len(mail.outbox) + len(signalled)
    assert arrived == 18 + (1 if point == "alerts:sent" else 0)
    assert {message.extra_headers["Message-ID"] for message in mail.outbox} == {
        f"<{pk}@localhost>" for pk in AlertDelivery.objects.filter(kind="email").values_list("pk", flat=True)
    }
