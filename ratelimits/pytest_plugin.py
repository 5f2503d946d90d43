"""The fixtures for pytest. pytest finds this module by itself, in every project whose environment has the app."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ratelimits.models.rules import Rule
    from ratelimits.testing import FrozenClock

# The fixtures import the app only when they run, because pytest loads this module before Django's settings are known.


@pytest.fixture(scope="session", autouse=True)
def _quota_server() -> None:
    """Tell the app that this process runs tests. Start the embedded server if the settings' server does not run."""
    from django.apps import apps
    from django.conf import settings

    if settings.configured and apps.ready and apps.is_installed("ratelimits"):
        from ratelimits.embedded import ServerStartError
        from ratelimits.testing import prepare_tests, start_server_if_needed

        prepare_tests()
        with suppress(ServerStartError):  # A test that needs the server raises this error again.
            start_server_if_needed()


@pytest.fixture
def override_rules() -> Iterator[Callable[[Iterable[Mapping[str, Any] | Rule]], None]]:
    """Return a function that takes rules. These rules replace the database's rules until the end of the test."""
    from ratelimits import testing

    with ExitStack() as stack:

        def override(rules: Iterable[Mapping[str, Any] | Rule]) -> None:
            stack.enter_context(testing.override_rules(rules))

        yield override


@pytest.fixture
def frozen_quota_clock() -> Iterator[FrozenClock]:
    """Stop the time of all decisions during the test. Return the clock, whose method `tick(seconds)` moves the time."""
    from ratelimits import testing

    with testing.frozen_quota_clock() as clock:
        yield clock


@pytest.fixture
def no_rate_limits() -> Iterator[None]:
    """Let every request of the test pass, and count nothing."""
    from ratelimits import testing

    with testing.no_rate_limits():
        yield
