"""The calls of other packages that limit requests, as cases to be timed. Each call follows its package's documentation.

The packages do less than this app: they decide one rule that is written in code, and count no usage. Only the usual
algorithms of a package are measured. All packages use redis-py with hiredis, as this app does. All limits are so high
that no request is refused.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any

import redis
from django.contrib.auth import get_user_model
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory
from rest_framework.request import Request
from rest_framework.throttling import UserRateThrottle

from benchmarks.support.timing import Case

#: Name of a package for pip -> the name of its module.
PACKAGES = {
    "limits": "limits",
    "throttled-py": "throttled",
    "pyrate-limiter": "pyrate_limiter",
    "django-ratelimit": "django_ratelimit",
    "django-smart-ratelimit": "django_smart_ratelimit",
}
#: A limit that is never reached.
MANY = 100_000_000


def steady(length: int) -> type[UserRateThrottle]:
    """Return DRF's throttle with a list of requests that always has this length.

    DRF stores a list of the requests of the last minute, and writes the whole list again at each request. So the time
    of a request depends on the length of the list. With the simulated clock of this throttle, the length stays the
    same.
    """
    moments = itertools.count(time.time(), 60 / length)

    class Steady(UserRateThrottle):
        # The rate is above the length of the list, so that no request is refused, even if moments are rounded.
        rate = f"{length + 2}/m"
        scope = f"bench{next(_numbers)}"

        @staticmethod
        def timer() -> float:
            return next(moments)

    return Steady


#: Numbers for the scopes: each throttle class has its own list of requests.
_numbers = itertools.count()


def user_request() -> HttpRequest:
    """Return a request by user 42 from an address."""
    request = RequestFactory(REMOTE_ADDR="203.0.113.9").get("/")
    request.user = get_user_model()(pk=42, username="someone")
    return request


def missing() -> list[str]:
    """Return the packages that are not installed."""
    return [name for name, module in PACKAGES.items() if importlib.util.find_spec(module) is None]


def cases(url: str) -> list[Case]:
    """Return the cases of every installed package and of DRF."""
    absent = missing()
    out = _drf()
    for name, make in _MAKERS.items():
        if name not in absent:
            out += make(url)
    return out


def _drf() -> list[Case]:
    request = Request(user_request())
    view: Any = object()

    def asks(*classes: type[UserRateThrottle]) -> Callable[[], object]:
        # DRF's APIView.check_throttles does the same: it makes new throttles for each request, and calls all of them.
        return lambda: all([throttle().allow_request(request, view) for throttle in classes])  # noqa: C419

    peer = "djangorestframework"
    return [
        Case("drf_one", "DRF's throttle (list of 10 requests)", "peer", asks(steady(10)), peer),
        Case("drf_long", "DRF's throttle (list of 100 requests)", "peer", asks(steady(100)), peer),
        Case("drf_three", "DRF's throttle, three of them", "peer", asks(steady(10), steady(10), steady(10)), peer),
    ]


def _limits(url: str) -> list[Case]:
    from limits import RateLimitItemPerMinute
    from limits.storage import RedisStorage
    from limits.strategies import FixedWindowRateLimiter, SlidingWindowCounterRateLimiter

    storage, item = RedisStorage(f"{url}/2"), RateLimitItemPerMinute(MANY)
    fixed, sliding = FixedWindowRateLimiter(storage), SlidingWindowCounterRateLimiter(storage)
    return [
        Case("limits_fixed", "limits, fixed window", "peer", lambda: fixed.hit(item, "user", "42"), "limits"),
        Case("limits_sliding", "limits, sliding counter", "peer", lambda: sliding.hit(item, "user", "42"), "limits"),
    ]


def _throttled(url: str) -> list[Case]:
    from throttled import RedisStore, Throttled, per_sec

    def asks(using: str) -> Callable[[], object]:
        throttle = Throttled(using=using, quota=per_sec(MANY, burst=MANY), store=RedisStore(server=f"{url}/2"))
        return lambda: not throttle.limit("user:42").limited

    return [
        Case(f"throttled_{using}", f"throttled-py, {using.replace('_', ' ')}", "peer", asks(using), "throttled-py")
        for using in ("fixed_window", "token_bucket", "gcra")
    ]


def _pyrate(url: str) -> list[Case]:
    from pyrate_limiter import GCRA, Duration, Limiter, Rate, RedisBucket, RedisStateStore, StateBucket

    client = redis.Redis.from_url(f"{url}/2")
    rates = [Rate(MANY, Duration.MINUTE)]
    log = Limiter(RedisBucket.init(rates, client, "pyrate:user:42"))
    state = Limiter(StateBucket(rates, GCRA(), RedisStateStore(client, "pyrate:state:42")))

    def acquire(limiter: Any) -> Callable[[], object]:
        return lambda: limiter.try_acquire("user:42", blocking=False)

    peer = "pyrate-limiter"
    return [
        # The log grows with each request, so each block of calls gets a new, short log.
        Case("pyrate_log", "PyrateLimiter, log", "peer", acquire(log), peer, lambda: client.delete("pyrate:user:42")),
        Case("pyrate_gcra", "PyrateLimiter, GCRA", "peer", acquire(state), peer),
    ]


def _django_ratelimit(url: str) -> list[Case]:
    from django_ratelimit.core import is_ratelimited

    request = user_request()

    def ask() -> object:
        return not is_ratelimited(request, group="bench", key="user", rate=f"{MANY}/m", increment=True)

    return [Case("django_ratelimit", "django-ratelimit", "peer", ask, "django-ratelimit")]


def _smart(url: str) -> list[Case]:
    from django_smart_ratelimit import rate_limit

    logging.getLogger("django_smart_ratelimit").setLevel(logging.ERROR)
    request = user_request()

    def asks(algorithm: str) -> Callable[[], object]:
        @rate_limit(key="user", rate=f"{MANY}/m", algorithm=algorithm)  # type: ignore[untyped-decorator]
        def view(_request: HttpRequest) -> HttpResponse:
            return response

        return lambda: view(request).status_code == 200

    response = HttpResponse()
    return [
        Case(
            f"smart_{algorithm}",
            f"django-smart-ratelimit, {algorithm.replace('_', ' ')}",
            "peer",
            asks(algorithm),
            "django-smart-ratelimit",
        )
        for algorithm in ("fixed_window", "token_bucket")
    ]


#: Name of a package for pip -> the function that returns its cases, for a server's URL without a database number.
_MAKERS = {
    "limits": _limits,
    "throttled-py": _throttled,
    "pyrate-limiter": _pyrate,
    "django-ratelimit": _django_ratelimit,
    "django-smart-ratelimit": _smart,
}
