"""Limit Celery tasks across all workers: `@shared_task(base=QuotaTask, quota="crm-sync")`.

Celery's own `rate_limit` limits each worker separately.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NoReturn

from celery import Task
from celery.exceptions import Ignore
from django.core.exceptions import ImproperlyConfigured

from ratelimits.algorithms.base import MICROSECONDS
from ratelimits.algorithms.limits import Algorithm
from ratelimits.answers.answer import Answer
from ratelimits.engine import Mode
from ratelimits.engine.clock import clock
from ratelimits.engine.program import Program
from ratelimits.outbound import waiting
from ratelimits.outbound.deciding import Outbound, Turn, WaitTooLong, algorithm_from_rate
from ratelimits.outbound.waiting import costs_by_meter
from ratelimits.quota import finishing
from ratelimits.quota.costs import ONE_REQUEST, valid_costs

#: The header of a task's message that contains the task's permit. In a permit, `at` is the moment at which the task may
#: run (in s since 1970 UTC). `granted` is the same moment by the server's clock (in µs). `retries` is the number of
#: retries before the attempt for which the permit is valid.
HEADER = "ratelimits_permit"
#: A task that may run within this number of seconds waits in its process. A message would take about as long.
MAX_SHORT_WAIT = 0.05


class QuotaTask(Task):  # type: ignore[type-arg]
    """A task that needs a permit to run.

    A worker that receives the task reserves a permit. If the permit is for a later moment, the worker sends the task
    again, to be run at this moment, and takes the next task. The message contains the permit, so the task is charged
    once. To send the task again in this way does not count as a retry. A retry of the task needs a new permit.

    A task that is called directly, or that runs eagerly (`task_always_eager`), is not limited.

    quota        the scope of the rules that limit the task
    quota_cost   a number of permits of the meter "requests", or a mapping of meters to costs
    quota_rate   a limit in code, used instead of rules: a text such as "50/s", or an Algorithm
    quota_grace  the seconds for which a permit stays valid. A task that begins later, for example after its worker was
                 killed, reserves a new permit
    """

    abstract = True
    #: A message is removed only after its task has ended. So a task is not lost if its worker is killed.
    acks_late = True
    reject_on_worker_lost = True
    quota: str = ""
    quota_cost: int | Mapping[str, int] = ONE_REQUEST
    quota_rate: str | Algorithm | None = None
    quota_grace: float = 5.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task if it may run now. Otherwise send it again for later, and raise Ignore."""
        if self.request.called_directly or self.request.is_eager:
            return super().__call__(*args, **kwargs)
        if not self._has_permit():
            self._reserve()
        return self.run(*args, **kwargs)

    def _has_permit(self) -> bool:
        permit = _permit_in(self.request)
        if permit is None or permit["retries"] != self.request.retries:
            return False
        return bool(time.time() - permit["at"] <= self.quota_grace)

    def _reserve(self) -> None:
        """Reserve a permit. If the task cannot run now, send it again for a later moment, and raise Ignore.

        Raise WaitTooLong if the limits can never grant a permit.
        """
        turn = waiting.run(self._outbound().ask(None))
        if turn.decision is not None:
            try:
                _check_limits(self.quota, turn.decision.program)
            except ImproperlyConfigured:
                finishing.give_back(Answer(turn.allowed, turn.decision))
                raise
        if not turn.allowed:
            if turn.retry_after is None:
                raise WaitTooLong(self.quota, turn.limit, None, None)
            self._postpone(_pause(turn), None)
        permit = {"at": time.time() + turn.wait, "retries": self.request.retries, "granted": _granted(turn)}
        if turn.wait > MAX_SHORT_WAIT:
            self._postpone(turn.wait, permit)
        clock.sleep(turn.wait)
        self.request.update({HEADER: permit})

    def _outbound(self) -> Outbound:
        if not self.quota:
            raise ImproperlyConfigured(f"{self.name}: name the quota, as in shared_task(base=QuotaTask, quota='crm')")
        algorithm = algorithm_from_rate(self.quota_rate) if isinstance(self.quota_rate, str) else self.quota_rate
        return Outbound(self.quota, valid_costs(costs_by_meter(self.quota_cost)), algorithm)

    def _postpone(self, seconds: float, permit: dict[str, Any] | None) -> NoReturn:
        """Send the task again with its permit, to be run in this number of seconds, and raise Ignore."""
        headers = {name: value for name, value in (self.request.headers or {}).items() if name != HEADER}
        if permit is not None:
            headers[HEADER] = permit
        eta = datetime.fromtimestamp(time.time() + seconds, UTC)
        self.signature_from_request(eta=eta, retries=self.request.retries, headers=headers).apply_async()
        # The message that is handled now is acknowledged only after this. If the worker is killed in between, the task
        # runs twice. This can happen to every task with `acks_late`.
        raise Ignore


def _permit_in(request: Any) -> dict[str, Any] | None:
    permit: dict[str, Any] | None = getattr(request, HEADER, None) or (request.headers or {}).get(HEADER)
    return permit


def _granted(turn: Turn) -> int | None:
    """Return the moment of a permit by the server's clock, in µs since 1970 UTC; None if the server was not asked."""
    return turn.decision.at + round(turn.decision.wait * MICROSECONDS) if turn.decision is not None else None


def _pause(turn: Turn) -> float:
    """Return the seconds after which a refused task asks again."""
    assert turn.retry_after is not None
    if turn.algorithm is not None and turn.algorithm.may_be_full:
        # A task accepts any wait, so this limit refuses it only if the queue is full. Perhaps the limit has refused
        # many tasks. They must not all ask again at the same moment.
        return turn.retry_after + random.uniform(0, float(turn.algorithm.suggested_max_wait or 0))  # noqa: S311
    return turn.retry_after


def _check_limits(quota: str, limits: Program) -> None:
    """Raise ImproperlyConfigured if a limit gives leases, or if no limit can say when a task may run.

    Without a limit that can say this, all waiting tasks would be refused and would ask again at the same moment. Limits
    in shadow mode do not matter.
    """
    enforced = [term for term in limits.terms if term.mode is Mode.ENFORCE]
    for term in enforced:
        if term.algorithm.leases:
            raise ImproperlyConfigured(
                f"the limit {term.name!r} of {quota!r} limits how many tasks run at once, and a task cannot wait"
                " until another task ends: set the worker's concurrency instead"
            )
    if enforced and not any(term.algorithm.may_wait for term in enforced):
        raise ImproperlyConfigured(
            f"no limit of {quota!r} can say when a task may run: choose token_bucket, gcra, leaky_bucket_queue,"
            " smooth_bursty or smooth_warming_up for one of its rules"
        )
