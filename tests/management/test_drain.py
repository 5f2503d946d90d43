from __future__ import annotations

from collections import Counter
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command

from ratelimits.usage import drain as draining
from ratelimits.usage.apply import BatchOutcome
from ratelimits.usage.drain import DrainResult


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("promise", "said"),
    [
        ("everysec", "appendfsync everysec"),
        ("window-10s", "fence window-10s"),
        ("durable+run-unreadable", "fence durable+run-unreadable"),
    ],
)
def test_a_promise_is_named_as_on_reports(monkeypatch: pytest.MonkeyPatch, promise: str, said: str) -> None:
    def drain(**_options: Any) -> DrainResult:
        return DrainResult(Counter(), lines=0, fsync=promise)

    monkeypatch.setattr(draining, "drain", drain)
    out = StringIO()
    call_command("ratelimits_drain", stdout=out)
    assert f"({said})." in out.getvalue()


@pytest.mark.django_db
def test_only_batches_that_did_not_reach_the_ledger_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = Counter(dict.fromkeys(BatchOutcome, 1))
    drained = DrainResult(outcomes, lines=5, fsync="always")

    def drain(**_options: Any) -> DrainResult:
        return drained

    monkeypatch.setattr(draining, "drain", drain)
    out = StringIO()
    call_command("ratelimits_drain", stdout=out)
    assert out.getvalue().splitlines() == [
        "Drained 1 batch, 5 lines (appendfsync always).",
        "discarded: 1",
        "quarantined: 1",
        "lost: 1",
        "busy: 1",
    ]
