"""Give a test of your project, or a part of a test, other rules, a stopped clock, or no limits.

`override_rules`, `frozen_quota_clock` and `no_rate_limits` are context managers, and decorators for functions, async
functions and classes of `unittest.TestCase`. pytest has fixtures with the same names. docs/testing.md has examples.

`prepare_tests` tells the app that this process runs tests. The pytest plugin and `runner.QuotaTestRunner` call it.
"""

from __future__ import annotations

from ratelimits.testing.preparing import prepare_tests, start_server_if_needed
from ratelimits.testing.tools import FrozenClock, frozen_quota_clock, no_rate_limits, override_rules

__all__ = [
    "FrozenClock",
    "frozen_quota_clock",
    "no_rate_limits",
    "override_rules",
    "prepare_tests",
    "start_server_if_needed",
]
