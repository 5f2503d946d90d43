"""Test the throttle classes with the cases of Django REST framework's own tests of its throttles.

The cases are those of its file tests/test_throttling.py, in other words. Each test names its case. Where the outcome
differs, the test says so; docs/moving.md lists these differences with their reasons. No test has a database.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest
from rest_framework.permissions import AllowAny
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.test import APIRequestFactory, force_authenticate
from rest_framework.throttling import BaseThrottle
from rest_framework.views import APIView

from ratelimits.throttling import AnonRateThrottle, ScopedRateThrottle, SimpleRateThrottle, UserRateThrottle


class Timed(SimpleRateThrottle):
    """The clock of all throttles of this module, in seconds."""

    now = 0.0

    def timer(self) -> float:
        return Timed.now


class ThreePerSecond(Timed, UserRateThrottle):
    rate = "3/sec"
    scope = "seconds"


class OneInTwoSeconds(Timed, UserRateThrottle):
    rate = "1/2s"
    scope = "seconds"


class ThreePerMinute(Timed, UserRateThrottle):
    rate = "3/min"
    scope = "minutes"


class SixPerMinute(Timed, UserRateThrottle):
    rate = "6/min"
    scope = "minutes"


class OnlyTheFirst(BaseThrottle):
    """A throttle of another kind, which knows no time."""

    asked = 0

    def allow_request(self, request: Request, view: APIView) -> bool:
        OnlyTheFirst.asked += 1
        return OnlyTheFirst.asked == 1


class Scoped(Timed, ScopedRateThrottle):
    THROTTLE_RATES = {"x": "3/min", "y": "1/min", "once": "1/day"}


@pytest.fixture(autouse=True)
def _start() -> None:
    Timed.now = 0


def view(*throttles: type[BaseThrottle], scope: str | None = None) -> Callable[..., Any]:
    """Return a view with these throttles."""

    class View(APIView):
        permission_classes = [AllowAny]
        throttle_classes = throttles
        throttle_scope = scope

        def get(self, request: Request) -> Response:
            return Response("foo")

    return View.as_view()


def get(user: User | None = None, **meta: Any) -> HttpRequest:
    request = APIRequestFactory().get("/", **meta)
    if user is not None:
        force_authenticate(request, user)
    return request


def statuses(limited: Callable[..., Any], count: int, request: HttpRequest | None = None) -> list[int]:
    request = request or get()
    return [limited(request).status_code for _ in range(count)]


def told(limited: Callable[..., Any], moments: Sequence[float]) -> list[str | None]:
    """Return the Retry-After of requests at these moments."""
    answers = []
    for Timed.now in moments:
        answers.append(limited(get()).headers.get("Retry-After"))
    return answers


class TestRates:
    """Cases of ThrottlingTests."""

    def test_requests_are_throttled(self) -> None:
        assert statuses(view(ThreePerSecond), 4) == [200, 200, 200, 429]

    def test_request_throttling_expires(self) -> None:
        limited = view(ThreePerSecond)
        assert statuses(limited, 4)[-1] == 429
        Timed.now = 1
        assert statuses(limited, 1) == [200]

    def test_request_throttling_is_per_user(self) -> None:
        limited = view(ThreePerSecond)
        assert statuses(limited, 4, get(User(pk=1))) == [200, 200, 200, 429]
        assert statuses(limited, 1, get(User(pk=2))) == [200]

    def test_request_throttling_multiple_throttles(self) -> None:
        """Differs: a request that one throttle refuses is not charged by the other, so one more passes later."""
        limited = view(ThreePerSecond, SixPerMinute)
        assert told(limited, [0, 0, 0, 0]) == [None, None, None, "1"]
        assert told(limited, [1, 1, 1, 1]) == [None, None, None, "59"]
        assert told(limited, [2]) == ["58"]

    def test_throttle_rate_change_negative(self) -> None:
        """Differs: of 24 requests at one moment three are charged, so the rate per minute still has three left."""
        limited = view(ThreePerSecond, SixPerMinute)
        assert told(limited, [0] * 24) == [None] * 3 + ["1"] * 21
        assert told(limited, [1] * 4) == [None] * 3 + ["59"]

    def test_request_throttling_with_amount_of_period(self) -> None:
        assert told(view(OneInTwoSeconds), [0, 0]) == [None, "2"]

    def test_seconds_fields(self) -> None:
        assert told(view(ThreePerSecond), [0, 0, 0, 0]) == [None, None, None, "1"]

    def test_minutes_fields(self) -> None:
        assert told(view(ThreePerMinute), [0, 0, 0, 0]) == [None, None, None, "60"]

    def test_next_rate_remains_constant_if_followed(self) -> None:
        assert told(view(ThreePerMinute), [0, 20, 40, 60, 80]) == [None] * 5

    def test_non_time_throttle(self) -> None:
        OnlyTheFirst.asked = 0
        limited = view(OnlyTheFirst, ThreePerMinute)
        answers = [limited(get()) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 429]
        assert not any("Retry-After" in answer.headers for answer in answers)


class TestScopes:
    """Cases of ScopedRateThrottleTests."""

    def test_scoped_rate_throttle(self) -> None:
        x, y = view(Scoped, scope="x"), view(Scoped, scope="y")
        for start in (0, 60):
            Timed.now = start
            answers = []
            for limited in (x, x, x, x, y, y):
                answers += statuses(limited, 1)
                Timed.now += 1
            assert answers == [200, 200, 200, 429, 200, 429]

    def test_unscoped_view_not_throttled(self) -> None:
        assert statuses(view(Scoped), 10) == [200] * 10

    def test_get_cache_key_returns_correct_key_if_user_is_authenticated(self) -> None:
        throttle, request = Scoped(), Request(HttpRequest())
        request.user = User(pk=7)
        scoped = APIView()
        scoped.throttle_scope = "x"  # type: ignore[attr-defined]
        throttle.allow_request(request, scoped)
        assert throttle.get_cache_key(request, scoped) == "throttle_x_7"


class TestAddresses:
    """Cases of IdWithXffBasicTests, XffSpoofingTests and XffUniqueMachinesTest."""

    FORWARDED = "0.0.0.0, 1.1.1.1, 2.2.2.2"

    def second(self, settings: Any, proxies: int, forwarded: str) -> int:
        """Return the status of a request with this X-Forwarded-For, after another one used up the rate."""
        settings.REST_FRAMEWORK = {**settings.REST_FRAMEWORK, "NUM_PROXIES": proxies}
        limited = view(Scoped, scope="once")
        for header in (self.FORWARDED, forwarded):
            answer = limited(get(REMOTE_ADDR="3.3.3.3", HTTP_X_FORWARDED_FOR=header))
        return int(answer.status_code)

    def test_accepts_request_under_limit(self, settings: Any) -> None:
        settings.REST_FRAMEWORK = {**settings.REST_FRAMEWORK, "NUM_PROXIES": 0}
        assert statuses(view(Scoped, scope="once"), 1) == [200]

    def test_denies_request_over_limit(self, settings: Any) -> None:
        assert self.second(settings, 0, self.FORWARDED) == 429

    def test_xff_spoofing_doesnt_change_machine_id_with_one_app_proxy(self, settings: Any) -> None:
        assert self.second(settings, 1, "4.4.4.4, 5.5.5.5, 2.2.2.2") == 429

    def test_xff_spoofing_doesnt_change_machine_id_with_two_app_proxies(self, settings: Any) -> None:
        assert self.second(settings, 2, "4.4.4.4, 1.1.1.1, 2.2.2.2") == 429

    def test_unique_clients_are_counted_independently_with_one_proxy(self, settings: Any) -> None:
        assert self.second(settings, 1, "0.0.0.0, 1.1.1.1, 7.7.7.7") == 200

    def test_unique_clients_are_counted_independently_with_two_proxies(self, settings: Any) -> None:
        assert self.second(settings, 2, "0.0.0.0, 7.7.7.7, 2.2.2.2") == 200


class TestApi:
    """Cases of BaseThrottleTests, SimpleRateThrottleTests and AnonRateThrottleTests."""

    def test_allow_request_raises_not_implemented_error(self) -> None:
        throttle: Any = BaseThrottle()
        with pytest.raises(NotImplementedError):
            throttle.allow_request(request={}, view={})

    def test_get_rate_raises_error_if_scope_is_missing(self) -> None:
        throttle = AnonRateThrottle()
        throttle.scope = None
        with pytest.raises(ImproperlyConfigured):
            throttle.get_rate()

    def test_throttle_raises_error_if_rate_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(SimpleRateThrottle, "scope", "invalid scope")
        with pytest.raises(ImproperlyConfigured):
            SimpleRateThrottle()

    def test_parse_rate_returns_tuple_with_none_if_rate_not_provided(self) -> None:
        assert AnonRateThrottle().parse_rate(None) == (None, None)

    def test_allow_request_returns_true_if_rate_is_none(self) -> None:
        throttle: Any = AnonRateThrottle()
        assert throttle.rate is None
        assert throttle.allow_request(request={}, view={}) is True

    def test_get_cache_key_raises_not_implemented_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(SimpleRateThrottle, "scope", "anon")
        throttle: Any = SimpleRateThrottle()
        with pytest.raises(NotImplementedError):
            throttle.get_cache_key({}, {})

    def test_allow_request_returns_true_if_key_is_none(self) -> None:
        throttle: Any = ThreePerMinute()
        throttle.get_cache_key = lambda *about: None
        assert throttle.allow_request(request={}, view={}) is True

    def test_wait_returns_correct_waiting_time_without_history(self) -> None:
        throttle = ThreePerMinute()
        throttle.num_requests, throttle.duration = 1, 60
        assert throttle.wait() == 30.0

    def test_wait_returns_none_if_there_are_no_available_requests(self) -> None:
        """Differs: after a lowered rate the time is known. It is None only if no request will ever pass."""
        assert statuses(view(ThreePerMinute), 3) == [200] * 3

        class Lowered(ThreePerMinute):
            rate = "1/min"

        class Never(ThreePerMinute):
            rate = "0/min"

        assert told(view(Lowered), [0, 20]) == ["60", "40"]
        answer = view(Never)(get())
        assert (answer.status_code, "Retry-After" in answer.headers) == (429, False)

    def test_authenticated_user_not_affected(self) -> None:
        request = Request(HttpRequest())
        request.user = User(pk=7)
        assert AnonRateThrottle().get_cache_key(request, APIView()) is None

    def test_get_cache_key_returns_correct_value(self) -> None:
        """Differs: all requests without an address count together, by a name that is not None."""
        throttle, request = AnonRateThrottle(), Request(HttpRequest())
        assert throttle.get_cache_key(request, APIView()) == "throttle_anon_unknown"
        request._request.META["REMOTE_ADDR"] = "3.3.3.3"
        assert throttle.get_cache_key(request, APIView()) == "throttle_anon_3.3.3.3"
