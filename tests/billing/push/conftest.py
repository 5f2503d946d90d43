from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime

import pytest
from django.conf import settings
from django.test import override_settings

from tests.billing.push.fakes import FAKES, Fake, options

#: The time of these tests, one day after the period whose report they push. It is passed in; no test waits for a clock.
NOW = datetime(2026, 11, 2, 12, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _at_once(fsync_at_once: None) -> None:
    """Have the server fsync at once, so that no test waits for the fence."""


@pytest.fixture
def fakes() -> Iterator[dict[str, Fake]]:
    """Start a fake of each billing system, with settings that push to them."""
    with ExitStack() as stack:
        found = {name: stack.enter_context(kind()) for name, kind in FAKES.items()}
        for fake in found.values():
            fake.now = NOW.timestamp
        pushed = {name: options(name, fake) for name, fake in found.items()}
        stack.enter_context(override_settings(RATELIMITS={**settings.RATELIMITS, "PUSH": pushed, "PUSH_TIMEOUT": 10}))
        yield found
        for fake in found.values():
            assert fake.invalid == []


@pytest.fixture
def stripe(fakes: dict[str, Fake]) -> Fake:
    return fakes["stripe"]


@pytest.fixture
def lago(fakes: dict[str, Fake]) -> Fake:
    return fakes["lago"]


@pytest.fixture(params=FAKES)
def each(request: pytest.FixtureRequest, fakes: dict[str, Fake]) -> tuple[str, Fake]:
    """Return the name and the fake of each billing system in turn."""
    return request.param, fakes[request.param]
