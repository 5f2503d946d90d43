"""Test that random histories of customers give the periods, totals, reports, amounts and files of an exact model.

The full number of customers has a command of its own: tests/long/months.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis
from django.test import override_settings

from tests.long.months import listed
from tests.support.plain import PLAIN
from tests.support.reports.months import SETTINGS, History
from tests.support.reports.months_compared import Comparison


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("late_usage", "disturbed"), [("version", False), ("period", True)])
def test_whatever_customers_do_their_bills_are_those_of_the_model(
    late_usage: str, disturbed: bool, redis_client: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    always_fsync: Callable[[bool], object] = lambda on: redis_client.config_set(  # noqa: E731
        "appendfsync", "always" if on else "everysec"
    )
    with override_settings(RATELIMITS={**PLAIN, **SETTINGS, "LATE_USAGE": late_usage}):
        history = History(f"sample {late_usage}", 12, 6, late_usage, always_fsync, disturbed=disturbed)
        history.run()
        comparison = Comparison(history)
        found = list(comparison.differences())
    with capsys.disabled():
        print(f"\n{listed(history.counts | comparison.counts)}: ", end="")
    assert "\n".join(found[:5]) == ""
