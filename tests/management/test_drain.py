from __future__ import annotations

from collections import Counter
from io import StringIO
from typing import Any

import pytest
import redis
from django.core.management import CommandError, call_command

from ratelimits.usage.ledger import drain as draining
from ratelimits.usage.ledger.apply import BatchOutcome
from ratelimits.usage.ledger.drain import DrainResult
from tests.support.entry_points import away
from tests.support.restricted import restricted
from tests.support.usage.traffic import use


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


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("fsync_at_once")
@pytest.mark.parametrize("command", ["seal", "drain"])
def test_a_command_names_the_right_that_the_server_refused(
    redis_client: redis.Redis, redis_url: str, command: str
) -> None:
    use("acme")
    call_command("ratelimits_seal", stdout=StringIO())
    refused = r"^Redis refuses a command: .*does not allow EVAL: ACL SETUSER <user> \+eval "
    with restricted(redis_client, redis_url, "-eval"), pytest.raises(CommandError, match=refused):
        call_command(f"ratelimits_{command}", stdout=StringIO())


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("command", ["seal", "drain"])
def test_a_server_that_is_away_does_not_answer(settings: Any, command: str) -> None:
    away(settings, 1)
    with pytest.raises(CommandError, match=r"^Redis does not answer: "):
        call_command(f"ratelimits_{command}", stdout=StringIO())
