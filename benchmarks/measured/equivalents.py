"""The algorithms of other packages. For each, the equivalent algorithm of this app is named.

Each algorithm is called as the documentation of its package shows. It is called with a limit so high that nothing is
refused, and with a limit so low that nearly everything is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import redis
from django.http import HttpRequest, HttpResponse
from rest_framework.request import Request
from rest_framework.throttling import UserRateThrottle

from benchmarks.measured.peers import MANY, missing, steady, user_request


class Equivalent(NamedTuple):
    """An algorithm of another package.

    algorithm  the equivalent algorithm of this app
    peer       the package, named as for pip
    title      the name of the algorithm in tables
    admits     makes a request that must be admitted, and returns whether it was admitted
    refuses    makes a request that must be refused, and returns whether it was refused
    before     is called before each block of calls, to delete a state that grows. None: no state grows
    """

    algorithm: str
    peer: str
    title: str
    admits: Callable[[], object]
    refuses: Callable[[], object]
    before: Callable[[], object] | None = None


def equivalents(url: str) -> list[Equivalent]:
    """Return the algorithms of all installed packages and of Django REST framework, on the server at this URL."""
    absent = missing()
    out = _drf()
    for name, make in _MAKERS.items():
        if name not in absent:
            out += make(url)
    return out


def _refuses(ask: Callable[[], object]) -> Callable[[], object]:
    return lambda: not ask()


def _drf() -> list[Equivalent]:
    request, view = Request(user_request()), None

    class Full(UserRateThrottle):
        """Refuses all requests except the first ten, because its clock never moves."""

        rate = "10/m"
        scope = "beside-full"

        @staticmethod
        def timer() -> float:
            return 1_000_000.0

    def asks(throttle: type[UserRateThrottle]) -> Callable[[], object]:
        return lambda: throttle().allow_request(request, view)  # type: ignore[arg-type]

    refuses = _refuses(asks(Full))
    return [
        Equivalent(
            "sliding_log",
            "djangorestframework",
            f"DRF's throttle (list of {length} requests)",
            asks(steady(length)),
            refuses,
        )
        for length in (10, 100)
    ]


def _limits(url: str) -> list[Equivalent]:
    from limits import RateLimitItemPerHour, RateLimitItemPerMinute
    from limits.storage import RedisStorage
    from limits.strategies import (
        FixedWindowRateLimiter,
        MovingWindowRateLimiter,
        RateLimiter,
        SlidingWindowCounterRateLimiter,
    )

    storage, wide, tight = RedisStorage(f"{url}/2"), RateLimitItemPerMinute(MANY), RateLimitItemPerHour(1)
    kinds: tuple[tuple[str, str, type[RateLimiter]], ...] = (
        ("fixed_window", "fixed window", FixedWindowRateLimiter),
        ("sliding_log", "moving window", MovingWindowRateLimiter),
        ("sliding_window", "sliding counter", SlidingWindowCounterRateLimiter),
    )

    def asks(limiter: RateLimiter, item: Any, name: str) -> Callable[[], object]:
        return lambda: limiter.hit(item, name, "42")

    return [
        Equivalent(
            algorithm,
            "limits",
            f"limits, {title}",
            asks(strategy(storage), wide, f"beside-{algorithm}"),
            _refuses(asks(strategy(storage), tight, f"beside-{algorithm}")),
        )
        for algorithm, title, strategy in kinds
    ]


def _throttled(url: str) -> list[Equivalent]:
    from throttled import RedisStore, Throttled, per_hour, per_sec

    def asks(using: str, quota: Any, key: str) -> Callable[[], object]:
        throttle = Throttled(using=using, quota=quota, store=RedisStore(server=f"{url}/2"))
        return lambda: not throttle.limit(key).limited

    kinds = {
        "fixed_window": "fixed_window",
        "sliding_window": "sliding_window",
        "gcra": "gcra",
        "token_bucket": "token_bucket",
        "leaking_bucket": "leaky_bucket",
    }
    return [
        Equivalent(
            algorithm,
            "throttled-py",
            f"throttled-py, {using.replace('_', ' ')}",
            asks(using, per_sec(MANY, burst=MANY), f"beside:{using}"),
            _refuses(asks(using, per_hour(1, burst=1), f"beside-full:{using}")),
        )
        for using, algorithm in kinds.items()
    ]


def _pyrate(url: str) -> list[Equivalent]:
    from pyrate_limiter import GCRA, Duration, Limiter, Rate, RedisBucket, RedisStateStore, StateBucket, TokenBucket

    client = redis.Redis.from_url(f"{url}/2")
    wide, tight = [Rate(MANY, Duration.MINUTE)], [Rate(1, Duration.HOUR)]

    def asks(bucket: Any) -> Callable[[], object]:
        limiter = Limiter(bucket)
        return lambda: limiter.try_acquire("user:42", blocking=False)

    def log(rates: list[Rate], key: str) -> Callable[[], object]:
        return asks(RedisBucket.init(rates, client, key))

    def state(kind: Any, rates: list[Rate], key: str) -> Callable[[], object]:
        return asks(StateBucket(rates, kind(), RedisStateStore(client, key)))

    out = [
        # The log grows with each request, so each block of calls gets a new, short log.
        Equivalent(
            "sliding_log",
            "pyrate-limiter",
            "PyrateLimiter, log",
            log(wide, "beside:log"),
            _refuses(log(tight, "beside-full:log")),
            lambda: client.delete("beside:log"),
        )
    ]
    for algorithm, title, kind in (("gcra", "GCRA", GCRA), ("token_bucket", "token bucket", TokenBucket)):
        admits = state(kind, wide, f"beside:{algorithm}")
        refuses = _refuses(state(kind, tight, f"beside-full:{algorithm}"))
        out.append(Equivalent(algorithm, "pyrate-limiter", f"PyrateLimiter, {title}", admits, refuses))
    return out


def _django_ratelimit(url: str) -> list[Equivalent]:
    from django_ratelimit.core import is_ratelimited

    request = user_request()

    def asks(rate: str) -> Callable[[], object]:
        return lambda: not is_ratelimited(request, group=f"beside-{rate}", key="user", rate=rate, increment=True)

    admits, refuses = asks(f"{MANY}/m"), _refuses(asks("1/h"))
    return [Equivalent("fixed_window", "django-ratelimit", "django-ratelimit", admits, refuses)]


def _smart(url: str) -> list[Equivalent]:
    from django_smart_ratelimit import rate_limit

    response = HttpResponse()

    def asks(algorithm: str, rate: str, user: int) -> Callable[[], object]:
        # This package has only one bucket for each user, whatever the rate is. So each rate needs its own user.
        request = user_request()
        request.user.pk = user

        @rate_limit(key="user", rate=rate, algorithm=algorithm)  # type: ignore[untyped-decorator]
        def view(_request: HttpRequest) -> HttpResponse:
            return response

        return lambda: view(request).status_code == 200

    return [
        Equivalent(
            algorithm,
            "django-smart-ratelimit",
            f"django-smart-ratelimit, {algorithm.replace('_', ' ')}",
            asks(algorithm, f"{MANY}/m", 42),
            _refuses(asks(algorithm, "1/h", 43)),
        )
        for algorithm in ("fixed_window", "token_bucket")
    ]


_MAKERS: dict[str, Callable[[str], list[Equivalent]]] = {
    "limits": _limits,
    "throttled-py": _throttled,
    "pyrate-limiter": _pyrate,
    "django-ratelimit": _django_ratelimit,
    "django-smart-ratelimit": _smart,
}
