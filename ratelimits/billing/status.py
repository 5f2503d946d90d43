"""What the bills add to the status page: facts about pushed lines and about the task that finalises."""

from __future__ import annotations

from collections.abc import Iterator

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ratelimits.billing.models import PushDelivery, PushReceiver
from ratelimits.status.additions import Additions, WorkerTask
from ratelimits.status.fact import Fact, Level
from ratelimits.usage.models import TaskRun
from ratelimits.usage.status.facts import count, count_text


def _facts(using: str, _now: float, _has_billing_rule: bool) -> Iterator[Fact]:
    states = PushDelivery.State
    undecided = (states.REFUSED, states.UNSURE, states.EXPIRED)
    # Name each receiver, so that the database can use the index on receiver and state.
    receivers = PushReceiver.objects.using(using).values("pk")
    failed = count(PushDelivery.objects.using(using).filter(receiver__in=receivers, state__in=undecided))
    hint = _("A person has to settle them: ratelimits_push --settle.") if failed else ""
    level = Level.AMBER if failed else Level.GREEN
    yield Fact("push", _("Failed push deliveries"), level, count_text(failed), hint, "pushdelivery")


ADDITIONS = Additions(
    facts=_facts,
    tasks=(
        WorkerTask(
            TaskRun.Task.FINALISE,
            gettext_lazy("Last finalisation of all accounts"),
            "FINALISE_INTERVAL",
            gettext_lazy("What people finalise in the admin, or for one account, does not count here."),
        ),
    ),
)
