"""Test that real HTTP clients wait as long as Retry-After says, and then succeed at the first attempt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import urllib3
from httpx_retries import Retry, RetryTransport

from project.models import ApiKey
from ratelimits import rules
from ratelimits.models import Account, Rule

pytestmark = pytest.mark.django_db(transaction=True)

#: The requests of each client. A limit of one request per second refuses all but the first at first.
REQUESTS = 3


@pytest.fixture
def headers(django_user_model: Any) -> Iterator[dict[str, str]]:
    """Return the headers of a customer of the demo's API, who may make one request per second."""
    rules.forget()
    user = django_user_model.objects.create(username="acme")
    Account.objects.create(identifier="acme")
    _key, secret = ApiKey.objects.issue(name="web", user=user, account="acme")
    Rule.objects.create(name="pace", key_kind="api_key", algorithm="gcra", capacity=1, rate=1, period=1)
    yield {"Authorization": f"Api-Key {secret}"}
    rules.forget()


def with_urllib3(url: str, headers: dict[str, str]) -> list[int]:
    retry = urllib3.Retry(total=3, status_forcelist=[429], respect_retry_after_header=True, backoff_factor=0)
    with urllib3.PoolManager(headers=headers, retries=retry) as pool:
        answers = [pool.request("GET", url) for _ in range(REQUESTS)]
    histories = [answer.retries.history if answer.retries is not None else () for answer in answers]
    return [answer.status for answer in answers] + [one.status or 0 for history in histories for one in history]


def with_httpx(url: str, headers: dict[str, str]) -> list[int]:
    seen: list[int] = []
    with httpx.Client(transport=RetryTransport(_noting(seen), Retry(total=3)), headers=headers) as client:
        answers = [client.get(url) for _ in range(REQUESTS)]
    return [answer.status_code for answer in answers] + [status for status in seen if status == 429]


def with_async_httpx(url: str, headers: dict[str, str]) -> list[int]:
    seen: list[int] = []

    async def ask() -> list[int]:
        async with httpx.AsyncClient(transport=RetryTransport(_anoting(seen), Retry(total=3)), headers=headers) as one:
            return [(await one.get(url)).status_code for _ in range(REQUESTS)]

    return asyncio.run(ask()) + [status for status in seen if status == 429]


def _noting(seen: list[int]) -> httpx.HTTPTransport:
    class Noting(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            response = super().handle_request(request)
            seen.append(response.status_code)
            return response

    return Noting()


def _anoting(seen: list[int]) -> httpx.AsyncHTTPTransport:
    class Noting(httpx.AsyncHTTPTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            response = await super().handle_async_request(request)
            seen.append(response.status_code)
            return response

    return Noting()


@pytest.mark.parametrize("client", [with_urllib3, with_httpx, with_async_httpx])
def test_a_client_waits_as_told_and_wastes_no_request(
    client: Callable[[str, dict[str, str]], list[int]], live_server: Any, headers: dict[str, str]
) -> None:
    started = time.monotonic()
    statuses = client(f"{live_server.url}/api/time/", headers)
    assert time.monotonic() - started >= REQUESTS - 1
    assert statuses[:REQUESTS] == [200] * REQUESTS
    # Each refusal is followed by a success: no request was refused twice.
    assert statuses[REQUESTS:] == [429] * (len(statuses) - REQUESTS)
    assert 1 <= len(statuses) - REQUESTS <= REQUESTS - 1
