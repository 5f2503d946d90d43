"""Change the plans of accounts at the ends of their billing periods.

The field *next plan* of an account names the plan from the next period on. A drain applies such a change within some
seconds after the end of the period. For bills, the change is in force exactly from the end of the period on, however
late it is applied.
"""

from __future__ import annotations

from collections import defaultdict
from time import time_ns

from django.db.models import Q

from ratelimits.algorithms.billing_periods import Period, Timeline
from ratelimits.models.accounts import Account
from ratelimits.models.history import because
from ratelimits.models.periods import timeline_of
from ratelimits.models.versions import editing
from ratelimits.moments import moment

_SECOND = 1_000_000


def schedule(account: Account, now: int | None = None) -> None:
    """Set `next_plan_at` of an unsaved account that has a next plan: to the end of the account's present period.

    A moment that is set already stays. `now` is in µs since 1970 UTC, by default this machine's clock.
    """
    if account.next_plan_id is None:
        account.next_plan_at = None
    elif account.next_plan_at is None:
        account.next_plan_at = moment(_present_period(account, time_ns() // 1000 if now is None else now).end)


def _present_period(account: Account, now: int) -> Period:
    timeline = timeline_of(account._state.db or Account.objects.db, account.identifier)
    # The row is not saved yet, so its terms are perhaps new. Then the present period is frozen when it is saved.
    timeline.freeze_until(now)
    return Timeline(account.timezone, account.billing_anchor, timeline.frozen).at(now)


def apply_due(using: str, now: int | None = None) -> int:
    """Give each account whose next plan is due this plan. Return how many accounts have changed.

    Accounts that code has given a next plan without a moment get the moment. `now` is in µs since 1970 UTC.
    """
    now = time_ns() // 1000 if now is None else now
    chosen = Account.objects.using(using).filter(next_plan__isnull=False)
    due: dict[tuple[int, int], list[int]] = defaultdict(list)
    for account in chosen.filter(Q(next_plan_at=None) | Q(next_plan_at__lte=moment(now))):
        if account.next_plan_at is None:
            schedule(account, now)
            account.save(using=using)
        else:
            assert account.next_plan_id is not None
            due[int(account.next_plan_at.timestamp()) * _SECOND, account.next_plan_id].append(account.pk)
    changed = 0
    for (at, plan), pks in sorted(due.items()):
        # `since` is the end of the period, so the bill of this period does not depend on when the change is applied.
        with because("scheduled for the end of the billing period"), editing(using, since=at):
            rows = chosen.filter(pk__in=pks, next_plan=plan, next_plan_at=moment(at))
            changed += rows.update(plan=plan, next_plan=None, next_plan_at=None)
    return changed
