"""Test the throttle classes that decide by rates: one call for all of a view, no query, and rates as people write them.

No test has a database, unless it is marked so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, ClassVar

import pytest
from adrf.views import APIView as AsyncView
from django.contrib.auth.models import User
from django.core.cache.backends.locmem import LocMemCache
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.test import AsyncRequestFactory, TestCase
from rest_framework import throttling
from rest_framework.permissions import AllowAny
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.test import APIRequestFactory, force_authenticate
from rest_framework.throttling import BaseThrottle
from rest_framework.views import APIView

from ratelimits.embedded import free_port
from ratelimits.engine import memory, memory_watch
from ratelimits.engine.counting import Count
from ratelimits.engine.keys import ledger_name
from ratelimits.engine.memory import Shortage
from ratelimits.engine.memory_watch import ADDRESSES
from ratelimits.engine.server import breaker
from ratelimits.engine.transport.breaker import FAILURES, PAUSE
from ratelimits.testing import frozen_quota_clock, no_rate_limits
from ratelimits.throttling import AnonRateThrottle, ScopedRateThrottle, SimpleRateThrottle, UserRateThrottle
from tests.end_to_end.test_round_trips import commands_of_clients
from tests.support.engine.memory import FULL, NEAR, looking_by_hand, notice, use_share
from tests.support.engine.proxy import Proxy
from tests.support.entry_points import away, begin_afresh
from tests.support.raw import RawRedis
from tests.support.servers import TestServers


class Burst(UserRateThrottle):
    scope, rate = "burst", "2/hour"


class Sustained(UserRateThrottle):
    scope, rate = "sustained", "4/day"


class Anonymous(AnonRateThrottle):
    rate = "3/day"


class ByStaff(UserRateThrottle):
    """A throttle that chooses its rate for each request, as many projects do."""

    scope, rate = "staff", "1/day"

    def allow_request(self, request: Request, view: APIView) -> bool:
        if request.query_params.get("free"):
            return True
        self.num_requests = 3 if request.query_params.get("staff") else 1
        return super().allow_request(request, view)


class Refusing(BaseThrottle):
    def allow_request(self, request: Request, view: APIView) -> bool:
        return False


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_afresh(monkeypatch)


def view(*throttles: type[BaseThrottle], base: type[APIView] = APIView) -> Callable[..., Any]:
    """Return a view with these throttles."""

    class View(base):  # type: ignore[misc, valid-type]
        authentication_classes: list[Any] = []
        permission_classes = [AllowAny]
        throttle_classes = throttles

        def get(self, request: Request) -> Response:
            return Response("foo")

    as_view: Callable[..., Any] = View.as_view()
    return as_view


def get(query: str = "", user: User | None = None) -> HttpRequest:
    request = APIRequestFactory().get(f"/?{query}", REMOTE_ADDR="203.0.113.9")
    if user is not None:
        force_authenticate(request, user)
    return request


def statuses(limited: Callable[..., Any], count: int, query: str = "", user: User | None = None) -> list[int]:
    return [limited(get(query, user)).status_code for _ in range(count)]


def decisions(commands: list[str]) -> int:
    """Return how many commands are decisions. The thread that counts refusals of earlier tests can send others."""
    counting = Count.script.sha.decode()
    return sum(command.startswith("EVALSHA ") and command.split()[1] != counting for command in commands)


class TestTogether:
    def test_all_throttles_of_a_view_are_decided_in_one_call(self, redis_url: str) -> None:
        limited = view(Burst, Sustained, Anonymous)
        statuses(limited, 1)
        with commands_of_clients(redis_url) as commands:
            assert statuses(limited, 3) == [200, 429, 429]
        assert decisions(commands) == 3

    def test_a_refused_request_is_charged_by_none(self) -> None:
        assert statuses(view(Sustained, Burst), 9) == [200] * 2 + [429] * 7
        assert statuses(view(Sustained), 3) == [200, 200, 429]

    def test_each_throttle_says_whether_it_refuses_and_all_say_for_how_long(self) -> None:
        asked: dict[str, Any] = {}

        class Noted(Burst):
            def throttle_failure(self) -> bool:
                asked["refused"] = self.scope
                return super().throttle_failure()

        class Charged(Sustained):
            def throttle_success(self) -> bool:
                asked["charged"] = asked.get("charged", 0) + 1
                return super().throttle_success()

        limited = view(Charged, Noted)
        answer = [limited(get()) for _ in range(3)][-1]
        assert asked == {"refused": "burst", "charged": 2}
        assert 3590 <= int(answer["Retry-After"]) <= 3600

    def test_a_throttle_may_choose_its_rate_in_allow_request(self, redis_url: str) -> None:
        limited = view(ByStaff, Sustained)
        assert statuses(limited, 2) == [200, 429]
        assert statuses(limited, 3, "staff=1") == [200, 200, 429]
        with commands_of_clients(redis_url) as commands:
            assert statuses(limited, 2, "free=1") == [200, 429]
        assert decisions(commands) == 2

    def test_rates_with_one_cache_key_have_a_counter_each(self) -> None:
        class Faster(Burst):
            rate = "3/day"

        assert statuses(view(Faster, Burst), 3) == [200, 200, 429]

    def test_views_share_a_counter_by_its_cache_key_as_ever(self) -> None:
        class Same(Burst):
            pass

        assert statuses(view(Burst), 1) + statuses(view(Same), 2) == [200, 200, 429]

    def test_a_throttle_that_asks_about_two_rates_is_asked_for_both(self) -> None:
        class Two(UserRateThrottle):
            rate = "5/day"

            def allow_request(self, request: Request, view: APIView) -> bool:
                answers = []
                for self.scope, self.num_requests in (("one", 5), ("two", 2)):
                    answers.append(super().allow_request(request, view))
                return all(answers)

        assert statuses(view(Two, Sustained), 3) == [200, 200, 429]

    def test_throttles_of_other_kinds_are_asked_too(self) -> None:
        assert statuses(view(Burst, Refusing), 1) == [429]


class TestApi:
    def test_they_are_throttles_of_django_rest_framework(self) -> None:
        for ours, its in (
            (SimpleRateThrottle, throttling.SimpleRateThrottle),
            (AnonRateThrottle, throttling.AnonRateThrottle),
            (UserRateThrottle, throttling.UserRateThrottle),
            (ScopedRateThrottle, throttling.ScopedRateThrottle),
        ):
            assert issubclass(ours, its)
            assert issubclass(ours, SimpleRateThrottle)

    @pytest.mark.parametrize(
        ("rate", "parsed"),
        [
            ("10/5min", (10, 300)),
            ("100 per day", (100, 86_400)),
            ("10/m", (10, 60)),
            ("10/5m", (10, 300)),
            ("3/s", (3, 1)),
            ("3 / 0.5 s", (3, 0.5)),
            ("7/week", (7, 604_800)),
        ],
    )
    def test_rates_are_read_as_people_write_them(self, rate: str, parsed: tuple[int, float]) -> None:
        assert Burst().parse_rate(rate) == parsed

    @pytest.mark.parametrize(
        ("rate", "says"),
        [
            ("100/month", "months and years have no fixed length"),
            ("10", "is not a rate: write a number, a slash and a length of time"),
            ("0.5/s", "is not a whole number of requests: write, for example, 1/2s instead of 0.5/s"),
            (10, "is not a rate"),
            ("5/0s", "period must be above 0"),
        ],
    )
    def test_a_text_that_is_not_a_rate_is_an_error_that_says_what_to_write(self, rate: str, says: str) -> None:
        class Mistyped(UserRateThrottle):
            pass

        Mistyped.rate = rate
        with pytest.raises(ImproperlyConfigured, match=says):
            view(Mistyped)(get())

    def test_rates_of_the_settings_can_be_changed_in_a_test(self, settings: Any) -> None:
        for count in (1, 2):
            rates = {"DEFAULT_THROTTLE_RATES": {"user": f"{count}/day"}}
            settings.REST_FRAMEWORK = {**settings.REST_FRAMEWORK, **rates}
            assert UserRateThrottle().num_requests == count

    def test_a_changed_rate_keeps_the_count(self) -> None:
        class Raised(Burst):
            rate = "3/hour"

        assert statuses(view(Burst), 3) == [200, 200, 429]
        assert statuses(view(Raised), 2) == [200, 429]

    def test_an_address_is_counted_as_everywhere_in_the_app(self) -> None:
        limited = view(Anonymous)
        addresses = ["2001:db8::1", "2001:db8::2", "[2001:db8::3]:80", "2001:db8::4", "2001:db8:0:1::1"]
        answers = []
        for address in addresses:
            request = get()
            request.META["REMOTE_ADDR"] = address
            answers.append(limited(request).status_code)
        assert answers == [200, 200, 200, 429, 200]

    def test_a_forged_header_opens_no_door(self) -> None:
        limited = view(Anonymous)
        answers = []
        for number in range(4):
            request = get()
            request.META["HTTP_X_FORWARDED_FOR"] = f"192.0.2.{number}"
            answers.append(limited(request).status_code)
        assert answers == [200, 200, 200, 429]

    @pytest.mark.parametrize("key", ["x" * 3000, "ß€𐍈 :{}|*", "\udcff\0"])
    def test_a_cache_key_may_be_any_text(self, key: str, redis_client: RawRedis) -> None:
        class Odd(Burst):
            def get_cache_key(self, request: Request, view: APIView) -> str:
                return key

        assert statuses(view(Odd), 3) == [200, 200, 429]
        assert all(len(name) < 200 for name in redis_client.keys("*"))

    def test_no_cache_key_is_the_digest_of_a_longer_one(self) -> None:
        class Named(Burst):
            def get_cache_key(self, request: Request, view: APIView) -> str:
                return request.query_params["name"]

        long = "x" * 300
        digest = ledger_name(f"throttle:{long}").removeprefix("throttle:")
        assert statuses(view(Named), 3, f"name={digest}") == [200, 200, 429]
        assert statuses(view(Named), 3, f"name={long}") == [200, 200, 429]

    def test_the_pause_between_requests_is_told_after_an_admitted_one_too(self) -> None:
        throttle = Burst()
        assert throttle.wait() == 1200
        assert throttle.allow_request(Request(get()), APIView())
        assert throttle.wait() == pytest.approx(1800, abs=5)
        assert ScopedRateThrottle().wait() is None


class TestFields:
    def test_every_response_tells_the_rates_and_what_is_left(self) -> None:
        limited = view(Burst, Sustained)
        first, _second, third = [limited(get()) for _ in range(3)]
        assert first["RateLimit-Policy"] == '"burst";q=2;w=3600, "sustained";q=4;w=86400'
        assert first["RateLimit"].startswith('"burst";r=1;t=')
        assert third["RateLimit"].startswith('"burst";r=0;t=')
        assert int(third["RateLimit"].rpartition("t=")[2]) <= int(third["Retry-After"])


class TestFailures:
    def test_while_redis_is_away_requests_pass(self, settings: Any) -> None:
        away(settings, free_port())
        assert statuses(view(Burst), 5) == [200] * 5

    def test_or_get_503_if_the_project_says_so(self, settings: Any) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "FAILURE_POLICY": "deny"}
        away(settings, free_port())
        assert statuses(view(Burst, Sustained), 5) == [503] * 5


class TestOwnResponse:
    """The setting REFUSAL_RESPONSE, as with QuotaThrottle."""

    @staticmethod
    def own(request: HttpRequest, answer: Any) -> HttpResponse | None:
        if "plain" in request.GET:
            return None
        said = "away" if answer.unavailable else f"wait {answer.retry_after:.0f}"
        return HttpResponse(f"{request.path_info}: {said}", status=420)

    @pytest.fixture(autouse=True)
    def _with_own_response(self, settings: Any) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "REFUSAL_RESPONSE": self.own}

    def test_a_refused_request_gets_it_with_the_fields(self) -> None:
        with frozen_quota_clock():
            limited = view(Sustained, Burst)
            assert statuses(limited, 2) == [200, 200]
            refused = limited(get())
        assert (refused.status_code, refused.content) == (420, b"/: wait 3600")
        assert refused["Retry-After"] == "3600"
        assert refused["RateLimit"].startswith('"burst";r=0;')

    def test_it_may_leave_a_refusal_as_it_is(self) -> None:
        assert statuses(view(Burst), 3, "plain=1") == [200, 200, 429]

    def test_a_throttle_may_still_let_a_refused_request_pass(self) -> None:
        class Lenient(Burst):
            def throttle_failure(self) -> bool:
                return True

        assert statuses(view(Lenient), 3) == [200] * 3

    def test_it_also_answers_while_redis_is_away(self, settings: Any) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "FAILURE_POLICY": "deny"}
        away(settings, free_port())
        refused = view(Burst)(get())
        assert (refused.status_code, refused.content) == (420, b"/: away")


def test_a_method_that_the_view_lacks_is_charged_as_by_django_rest_framework() -> None:
    class Theirs(throttling.UserRateThrottle):
        rate, cache = "2/day", LocMemCache("ratelimits-405", {})

    class Ours(UserRateThrottle):
        rate = "2/day"

    def asked(throttle: type[BaseThrottle]) -> list[int]:
        request = APIRequestFactory().put("/", REMOTE_ADDR="203.0.113.9")
        limited = view(throttle)
        return [limited(request).status_code for _ in range(3)]

    assert asked(Theirs) == asked(Ours) == [405, 405, 429]


class Watching(Burst):
    """A subclass as projects have it: it reads what Django REST framework's class gives to its own methods."""

    seen: ClassVar[list[tuple[int, float | None, float | None]]] = []

    def throttle_success(self) -> bool:
        self.history.insert(0, self.now)
        self.cache.set(self.key, self.history, self.duration)
        return super().throttle_success()

    def wait(self) -> float | None:
        assert self.duration is not None
        oldest = self.duration - (self.now - self.history[-1]) if self.history else None
        self.seen.append((len(self.history), oldest, super().wait()))
        return self.seen[-1][2]


def test_a_subclass_finds_the_timer_the_moment_and_the_history() -> None:
    Watching.seen.clear()
    with frozen_quota_clock(datetime(2026, 3, 1, tzinfo=UTC)) as clock:
        throttle = Watching()
        assert throttle.history == []
        assert throttle.timer() == clock.now.timestamp()
        limited = view(Watching)
        assert statuses(limited, 1) == [200]
        clock.tick(10)
        assert statuses(limited, 2) == [200, 429]
        # Redis says when the first of the two requests ends, as the history would.
        assert Watching.seen == [(2, 3590.0, 3590.0)]
    assert abs(Watching().timer() - time.time()) < 60


class OwnDecision(Burst):
    """A subclass that has a copy of Django REST framework's `allow_request`."""

    kept: ClassVar[list[float]] = []

    def allow_request(self, request: Any, view: Any) -> bool:
        self.now, self.history = self.timer(), list(self.kept)
        if len(self.history) >= 2:
            return False
        self.kept.insert(0, self.now)
        return True


def test_a_subclass_can_decide_by_its_own_history() -> None:
    OwnDecision.kept.clear()
    limited = view(OwnDecision)
    with frozen_quota_clock() as clock:
        assert statuses(limited, 1) == [200]
        clock.tick(60)
        assert statuses(limited, 1) == [200]
        refused = limited(get())
        assert (refused.status_code, refused["Retry-After"]) == (429, "3540")


def test_the_stopped_clock_of_a_test_moves_them_too() -> None:
    limited = view(Burst)
    with frozen_quota_clock() as clock:
        assert statuses(limited, 3) == [200, 200, 429]
        clock.tick(3599)
        assert limited(get())["Retry-After"] == "1"
        clock.tick(1)
        assert statuses(limited, 3) == [200, 200, 429]
    with no_rate_limits():
        assert statuses(limited, 3) == [200, 200, 200]


def test_async_views_are_limited_too() -> None:
    class View(AsyncView):  # type: ignore[misc]
        authentication_classes: list[Any] = []
        permission_classes = [AllowAny]
        throttle_classes = [Burst, Sustained]

        async def get(self, request: Any) -> Response:
            return Response("foo")

    async def asked() -> list[int]:
        limited: Any = View.as_view()
        return [(await limited(AsyncRequestFactory().get("/"))).status_code for _ in range(3)]

    assert asyncio.run(asked()) == [200, 200, 429]


class TestOfAProject(TestCase):
    """Tests of a project: each has the whole rate."""

    def test_one(self) -> None:
        assert statuses(view(Burst), 3) == [200, 200, 429]

    def test_other(self) -> None:
        assert statuses(view(Burst), 3) == [200, 200, 429]
        with self.assertNumQueries(0):
            statuses(view(Burst), 1)


class TestShortMemory:
    """While the memory of Redis is short, new addresses share a count. Known addresses and users keep theirs."""

    @pytest.fixture(autouse=True)
    def _by_hand(self, monkeypatch: pytest.MonkeyPatch, redis_client: RawRedis) -> Iterator[None]:
        with looking_by_hand(monkeypatch, redis_client):
            yield

    @staticmethod
    def status(address: str, *throttles: type[BaseThrottle]) -> int:
        request = APIRequestFactory().get("/", REMOTE_ADDR=address)
        code: int = view(*(throttles or (Anonymous, Burst)))(request).status_code
        return code

    @pytest.mark.parametrize("level", [Shortage.NEAR, Shortage.SHORT, Shortage.FULL])
    def test_new_addresses_share_a_count(self, level: Shortage) -> None:
        assert self.status("203.0.113.1") == 200
        notice(memory.starts()[level])
        assert memory.level is level
        assert [self.status(f"203.0.113.{number}") for number in (2, 3, 4)] == [200, 200, 429]
        assert [self.status("203.0.113.1") for _ in range(2)] == [200, 429]
        assert self.status("198.51.100.1") == (200 if level is Shortage.NEAR else 429)
        memory.forget()
        assert self.status("203.0.113.4") == 200

    def test_while_the_app_is_switched_off_redis_is_asked_nothing(self, servers: TestServers, settings: Any) -> None:
        notice(NEAR)
        memory_watch._new_addresses, memory_watch._not_before = ADDRESSES, 0.0
        with Proxy(servers.redis.port) as proxy:
            away(settings, proxy.port)
            settings.RATELIMITS = {**settings.RATELIMITS, "ENABLED": False}
            assert [self.status("203.0.113.1") for _ in range(4)] == [200] * 4
            assert proxy.connections == 0
        assert memory_watch._new_addresses > ADDRESSES, "no thread was woken to ask how much memory is used"

    @pytest.mark.django_db
    def test_users_keep_their_own_count(self) -> None:
        users = [User.objects.create(username=name) for name in ("one", "two")]
        notice(0.95)
        limited = view(Anonymous, Burst)
        assert [limited(get(user=user)).status_code for user in (*users, *users)] == [200] * 4

    def test_the_request_that_tries_again_is_decided_also_if_its_address_is_new(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without a thread that asks for it, the breaker lets one request in a second try."""
        clock = begin_afresh(monkeypatch)
        assert self.status("198.51.100.1", Anonymous) == 200
        notice(NEAR)
        for _ in range(FAILURES):
            breaker.failed()
        assert [self.status("203.0.113.1", Anonymous) for _ in range(4)] == [200] * 4, "not decided"
        clock.now += PAUSE
        assert [self.status("203.0.113.1", Anonymous) for _ in range(4)] == [200, 200, 200, 429]

    def test_a_full_server_decides(self, redis_client: RawRedis) -> None:
        assert self.status("203.0.113.1", Anonymous) == 200
        use_share(redis_client, FULL)
        assert [self.status("203.0.113.1", Anonymous) for _ in range(3)] == [200, 200, 429]
        assert [self.status(f"10.0.{number}.1", Anonymous) for number in range(4)] == [200, 200, 200, 429]
