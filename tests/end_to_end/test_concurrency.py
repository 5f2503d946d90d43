from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from project.models import ApiKey
from ratelimits.models import Rule
from tests.support.siblings import Sibling

# One permit a day comes back, and the window opens at the first request: no permit comes back during the test.
LIMITS: dict[str, dict[str, Any]] = {
    "token_bucket": {"capacity": 100, "rate": 1, "period": 86_400},
    "fixed_window": {"capacity": 100, "period": 86_400, "window_start": "first_hit"},
}


# Processes that repeat refusals from memory meet less often at the server. Both ways must be exact.
@pytest.mark.parametrize(
    ("algorithm", "deny_cache_seconds"),
    [
        ("token_bucket", "0"),
        pytest.param("token_bucket", "1", marks=pytest.mark.long),
        pytest.param("fixed_window", "0", marks=pytest.mark.long),
        pytest.param("fixed_window", "1", marks=pytest.mark.long),
    ],
)
def test_eight_processes_at_once_are_admitted_exactly_as_often_as_the_limit_says(
    algorithm: str,
    deny_cache_seconds: str,
    environment: dict[str, str],
    askers: Callable[[int], list[Sibling]],
    issue_key: Callable[[str], tuple[ApiKey, str]],
    long_run: bool,
) -> None:
    numbers: dict[str, Any] = LIMITS[algorithm]
    Rule.objects.create(name="hundred", key_kind="api_key", algorithm=algorithm, **numbers)
    environment["RATELIMITS_DENY_CACHE_SECONDS"] = deny_cache_seconds
    processes = askers(8)
    trials, times = (20, 400) if long_run else (1, 100)
    seen = []
    for trial in range(trials):
        _, secret = issue_key(f"trial-{trial}")
        for process in processes:
            process.ask({"secret": secret, "times": times})
        answers = [process.answer()["statuses"] for process in processes]
        seen.append(tuple(sum(answer.get(status, 0) for answer in answers) for status in ("200", "429")))
    assert seen == [(100, 8 * times - 100)] * trials
