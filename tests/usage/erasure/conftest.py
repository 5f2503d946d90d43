from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from django.test import override_settings
from pytest_django import DjangoDbBlocker

from ratelimits.billing.verification import Verification
from tests.billing.reports.verify.test_report import SIGNED

#: Takes manifests and archives. Returns what verification finds.
Findings = Callable[..., list[str]]


@pytest.fixture(autouse=True)
def _at_once(fsync_at_once: None) -> None:
    """Have the server fsync at once, so that no test waits for the fence."""


@pytest.fixture(autouse=True)
def _signed() -> Iterator[None]:
    """Sign, with few shards, and let usage of any time be refunded."""
    with override_settings(RATELIMITS={**SIGNED, "RECEIPT_TTL": 10 * 365 * 86_400, "SHARDS": 4}):
        yield


@pytest.fixture
def findings(django_db_blocker: DjangoDbBlocker) -> Findings:
    """Return a function that verifies everything."""

    def verify(given: list[dict[str, Any]], *paths: Path) -> list[str]:
        # An archive opens its own database.
        with (
            django_db_blocker.unblock(),
            closing(Verification(manifests=given, archives=paths).findings()) as errors,
        ):
            return list(errors)

    return verify
