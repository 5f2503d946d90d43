"""Throttle classes with the names and the API of Django REST framework's own classes, decided by Redis.

Rates are written in code or in DEFAULT_THROTTLE_RATES. So the classes need no row of the database and make no query.
If a view has several of these throttles, one call decides them together: a request is charged under all of them or
under none. No usage is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from functools import lru_cache
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from django.core.exceptions import ImproperlyConfigured
from django.utils.functional import classproperty
from rest_framework import throttling
from rest_framework.request import Request
from rest_framework.settings import api_settings

from ratelimits.addresses import address_of, coarser_keys
from ratelimits.algorithms import typed_rates
from ratelimits.algorithms.base import MICROSECONDS
from ratelimits.algorithms.limits import Limit, SlidingLog
from ratelimits.answers import headers, observing
from ratelimits.answers.answer import PASSED, Answer
from ratelimits.conf import conf, shown
from ratelimits.engine import decide, memory, memory_watch, server
from ratelimits.engine.clock import clock
from ratelimits.engine.command import StatesExist
from ratelimits.engine.decide import call_for
from ratelimits.engine.keys import ledger_name
from ratelimits.engine.server import UNDECIDED, breaker, current_server, note_failure
from ratelimits.logs import bounded
from ratelimits.naming import spelled
from ratelimits.signals import request_refused
from ratelimits.throttling.view_responses import REFUSED, add_fields, raise_refusal

if TYPE_CHECKING:
    from rest_framework.views import APIView  # Not at runtime: `views` imports the throttle classes itself.

logger = bounded(__name__)

#: The attribute of a request that contains the outcomes of its throttles.
_OUTCOMES = "_ratelimits_outcomes"
#: Maximum number of moments in `SimpleRateThrottle.history`.
_MAX_HISTORY = 10_000
#: Keys that Redis has a log of. Redis is not asked again about them while memory is short.
_known: set[str] = set()
_MAX_KNOWN = 8192
memory.on_change.append(_known.clear)


def _server_time() -> float:
    """Return an estimate of the Redis server's time, in seconds since 1970 UTC."""
    return clock.now() / MICROSECONDS


class _KeyAndRate(NamedTuple):
    """What one throttle counts for a request: the cache key, the rate, and the name that clients see.

    At most `num_requests` requests are admitted in any `duration` seconds.
    """

    cache_key: str
    num_requests: int
    duration: float
    name: str


class _Outcome(NamedTuple):
    """The result of one throttle.

    self_admits  whether the rate of this throttle admits the request
    all_admit    whether all throttles of the view admit the request
    wait         what `SimpleRateThrottle.wait` returns, in seconds
    remaining    the number of requests that this throttle would still admit
    answer       the answer to the request
    """

    self_admits: bool
    all_admit: bool
    wait: float | None
    remaining: int
    answer: Answer


_Outcomes = dict[_KeyAndRate, _Outcome]


class SimpleRateThrottle(throttling.SimpleRateThrottle):
    """The base class. `get_cache_key` of a subclass says which requests are counted together.

    `rate` is a text such as "10/s", "100 per day" or "10/5min". "10/5min" means: at most ten requests are admitted in
    any interval of five minutes. The Redis server's clock decides, unless `timer` is set.
    """

    num_requests: int | None = None
    duration: float | None = None
    #: A callable that returns the present moment in seconds since 1970 UTC. Tests can set it. If it is not set, the
    #: Redis server gives the moment of decisions, and the timer is an estimate of the server's time.
    timer: Callable[[], float] = staticmethod(_server_time)
    #: As in Django REST framework, the moment of the request, in seconds since 1970 UTC.
    now: float
    _history: list[float] | None = None
    #: Usually None. `_keys_and_rates` sets a list, to ask what this throttle counts. Then `allow_request` only adds its
    #: cache key and its rate to the list, and decides nothing.
    _collected: list[_KeyAndRate] | None = None
    _outcome: _Outcome | None = None
    #: Usually None. `_affordable_key` sets the key that `get_ident` returns instead of the client's address.
    _shared_address: str | None = None

    if not TYPE_CHECKING:

        @classproperty
        def THROTTLE_RATES(cls) -> dict[str, str | None]:  # noqa: N802, N805  (the name is Django REST framework's)
            """Return DEFAULT_THROTTLE_RATES. A subclass can have a dict of its own."""
            return api_settings.DEFAULT_THROTTLE_RATES

    def parse_rate(self, rate: str | None) -> tuple[int | None, float | None]:  # type: ignore[override]
        """Return how many requests are admitted, and in how many seconds. Return (None, None) if `rate` is None.

        Raise ImproperlyConfigured if the text is not a rate.
        """
        if rate is None:
            return None, None
        try:
            permits, period = typed_rates.rate(str(rate))
            if permits % 1:
                raise ValueError(
                    f"“{rate}” is not a whole number of requests: write, for example, 1/2s instead of 0.5/s."
                )
        except ValueError as error:
            raise ImproperlyConfigured(f"{type(self).__module__}.{type(self).__qualname__}: {error}") from error
        return int(permits), float(period) if period % 1 else int(period)

    def get_ident(self, request: Request) -> str:
        """Return the client's address. For an IPv6 address, return its /64 network, which is counted as one client.

        The settings NUM_PROXIES and TRUSTED_PROXIES say which proxies are trusted, and so which entries of the header
        X-Forwarded-For (or ADDRESS_HEADER) are read. If neither is set, the header is not read.
        """
        memory_watch.address_seen()
        return (self._shared_address or address_of(getattr(request, "_request", request))).removeprefix("ip:")

    def allow_request(self, request: Request, view: APIView) -> bool:
        """Return whether this throttle admits the request.

        The first throttle of a view also decides for the view's other throttles of this module. Raise QuotaUnavailable
        if Redis does not answer and FAILURE_POLICY is "deny". If the project has its own response to refused requests
        (REFUSAL_RESPONSE), raise QuotaRefused after a refusal. The view answers this error with the project's response.
        """
        if self.rate is None or self.num_requests is None or self.duration is None:
            return True
        self.key = self.get_cache_key(request, view)
        if self.key is None:
            return True
        if memory.level and conf.ENABLED:
            self.key = self._affordable_key(request, view, self.key)
        key_and_rate = _KeyAndRate(str(self.key), self.num_requests, self.duration, self.scope or type(self).__name__)
        if self._collected is not None:
            self._collected.append(key_and_rate)
            return True
        self.now, self._history = self.timer(), None
        self._outcome = outcome = self._outcome_of(key_and_rate, request, view)
        if not outcome.self_admits:
            admitted = self.throttle_failure()  # A subclass can return True, to admit the request.
            if not admitted and conf.REFUSAL_RESPONSE is not None:
                raise_refusal(getattr(request, "_request", request), outcome.answer, view)
            return admitted
        # If only another throttle refuses the request, this throttle returns True. The other throttle returns False.
        return self.throttle_success() if outcome.all_admit else True

    def _affordable_key(self, request: Request, view: APIView, key: Any) -> Any:
        """Return the cache key that counts a request without a new state in Redis, if possible (see `engine.memory`).

        `key` is the request's own cache key. Return it if Redis has its state, or if it does not contain an address.
        """
        for address in coarser_keys(address_of(getattr(request, "_request", request)))[: memory.coarser()]:
            self._shared_address = address
            try:
                coarser = self.get_cache_key(request, view)
            finally:
                self._shared_address = None
            if coarser in (None, key) or is_known(_limit_key(key)):
                break
            key = coarser
        return key

    @property
    def history(self) -> list[float]:
        """Return the moments of the counted requests, as Django REST framework's class has them, newest first.

        Redis gives only the number of these requests and the time until the next one is admitted. So their moments are
        estimates. After a refusal, the last moment is exact. A change of this list changes no limit.
        """
        if self._history is None:
            self._history = self._counted_moments()
        return self._history

    @history.setter
    def history(self, moments: list[float]) -> None:
        self._history = moments

    def _counted_moments(self) -> list[float]:
        outcome = self._outcome
        if outcome is None or self.num_requests is None or self.duration is None:
            return []
        refused = not outcome.self_admits
        # Django REST framework adds the present request only after it was admitted.
        count = self.num_requests if refused else self.num_requests - outcome.remaining - 1
        oldest = self.now - self.duration + outcome.wait if refused and outcome.wait is not None else self.now
        return [self.now] * min(count - 1, _MAX_HISTORY) + [oldest] if count > 0 else []

    def throttle_success(self) -> bool:
        """Return True. `allow_request` calls this method if all throttles of the view admit the request."""
        return True

    def wait(self) -> float | None:
        """Return the number of seconds after which the client should send its next request.

        After a refusal, this is the time until the same request would be admitted. Return None if it can never be
        admitted. After an admitted request, a client that waits this long between its requests is not refused.
        """
        if self._outcome is not None:
            return self._outcome.wait
        if self._history is not None:
            return super().wait()  # A subclass decides in its own `allow_request`, and has set the history.
        if self.duration is None or self.num_requests is None:
            return None
        # Nothing was decided: assume that the client has sent no requests yet.
        return self.duration / (self.num_requests + 1)

    def _outcome_of(self, key_and_rate: _KeyAndRate, request: Request, view: APIView) -> _Outcome:
        """Return the outcome of this throttle. The first throttle of a view decides for all of them."""
        attributes: dict[str, Any] = getattr(request, "__dict__", {})
        outcomes: _Outcomes | None = attributes.get(_OUTCOMES)
        if outcomes is None:
            keys_and_rates = [key_and_rate, *_keys_and_rates(request, view)]
            outcomes = attributes[_OUTCOMES] = self._decide(list(dict.fromkeys(keys_and_rates)), request, view)
        outcome = outcomes.pop(key_and_rate, None)
        # There is no outcome if this throttle was asked about this request before, or if it had another key or rate
        # when `_keys_and_rates` asked it. Then decide only this throttle.
        return outcome if outcome is not None else self._decide([key_and_rate], request, view)[key_and_rate]

    def _decide(self, keys_and_rates: list[_KeyAndRate], request: Request, view: APIView) -> _Outcomes:
        limits = list(_limits(keys_and_rates))
        answer = check_limits(limits, None if self.timer is _server_time else int(self.timer() * MICROSECONDS))
        if answer.unavailable:
            add_fields(request, view, REFUSED)
            raise_refusal(getattr(request, "_request", request), answer, view)
        add_fields(request, view, _fields(answer, limits, keys_and_rates) | ({} if answer.allowed else REFUSED))
        return _outcomes(answer, keys_and_rates)


class AnonRateThrottle(throttling.AnonRateThrottle, SimpleRateThrottle):
    """Limits anonymous clients: each address separately. The scope is "anon"."""


class UserRateThrottle(throttling.UserRateThrottle, SimpleRateThrottle):
    """Limits each user, and each address of anonymous clients. The scope is "user"."""


class ScopedRateThrottle(throttling.ScopedRateThrottle, SimpleRateThrottle):
    """Limits each user and address under the rate of the view's `throttle_scope`. Without a scope it limits nothing."""


def _keys_and_rates(request: Request, view: APIView) -> list[_KeyAndRate]:
    """Return what each throttle of a view counts for a request, in the order of the throttles.

    The throttle that calls this function is in the list too. Each throttle runs its whole `allow_request`, because
    subclasses can choose their rate there.
    """
    collected: list[_KeyAndRate] = []
    get_throttles = getattr(view, "get_throttles", None)
    for throttle in get_throttles() if get_throttles is not None else ():
        if isinstance(throttle, SimpleRateThrottle):
            throttle._collected = collected
            throttle.allow_request(request, view)
    return collected


def _limits(keys_and_rates: Iterable[_KeyAndRate]) -> Iterator[Limit]:
    """Yield the limits. Raise ImproperlyConfigured for numbers that are not valid."""
    cache_keys = set()
    for key_and_rate in keys_and_rates:
        try:
            algorithm = _algorithm(key_and_rate.num_requests, key_and_rate.duration)
        except ValueError as error:
            raise ImproperlyConfigured(
                f"The rate of the throttle {shown(key_and_rate.name)} is not valid: {error}"
            ) from error
        # A counter belongs to its cache key, and keeps its count if the rate changes. But if a view has several rates
        # with the same cache key, the second rate and each further rate have their own counters.
        name = f"{key_and_rate.num_requests}/{key_and_rate.duration}" if key_and_rate.cache_key in cache_keys else ""
        cache_keys.add(key_and_rate.cache_key)
        yield Limit(_limit_key(key_and_rate.cache_key), algorithm, name)


def _limit_key(cache_key: object) -> str:
    # A client can choose the cache key, but it must not choose one that looks like the digest of a longer one.
    return ledger_name(f"throttle:{spelled(str(cache_key))}")


def _outcomes(answer: Answer, keys_and_rates: Sequence[_KeyAndRate]) -> _Outcomes:
    if answer.decision is None:  # FAILURE_POLICY admits the request, or ENABLED is False.
        return {
            key_and_rate: _Outcome(True, True, wait=0.0, remaining=key_and_rate.num_requests, answer=answer)
            for key_and_rate in keys_and_rates
        }
    return {
        key_and_rate: _Outcome(
            self_admits=standing.allowed,
            all_admit=answer.allowed,
            wait=standing.reset_after / (standing.remaining + 1) if standing.allowed else answer.retry_after,
            remaining=standing.remaining,
            answer=answer,
        )
        for key_and_rate, standing in zip(keys_and_rates, answer.decision.standings, strict=True)
    }


def _fields(answer: Answer, limits: Sequence[Limit], keys_and_rates: Sequence[_KeyAndRate]) -> dict[str, str]:
    """Return the response's header fields that describe the limits, such as RateLimit."""
    decision = answer.decision
    if decision is None or decision.binding is None:
        return {}
    named = zip(keys_and_rates, limits, strict=True)
    policies = headers.policies([headers.policy(key_and_rate.name, limit.algorithm) for key_and_rate, limit in named])
    name = headers.quoted(keys_and_rates[decision.binding].name)
    return headers.fields(decision, policies, name, allowed=answer.allowed, retry_after=answer.retry_after)


@lru_cache(maxsize=1024)
def _algorithm(num_requests: int, duration: float) -> SlidingLog:
    return SlidingLog(num_requests, Decimal(str(duration)))


def check_limits(limits: Sequence[Limit], now: int | None = None) -> Answer:
    """Decide one request. If an enforced limit refuses it, charge no limit. Otherwise charge each limit that admits it.

    `now` is the moment of the decision in µs since 1970 UTC. If it is None, the server's time is used. If Redis cannot
    be asked, the setting FAILURE_POLICY decides.
    """
    if not conf.ENABLED:
        return PASSED
    if observing.observers:
        started = perf_counter_ns()
        answer = _decided(limits, now)
        observing.observe(answer, "*", started, perf_counter_ns())
    else:
        answer = _decided(limits, now)
    if not answer.allowed and request_refused.receivers:
        # Rates in code belong to no scope. They count requests by a cache key instead of an identity.
        observing.refused(answer, identity=None, scope="*", method="")
    return answer


def _decided(limits: Sequence[Limit], now: int | None) -> Answer:
    if server.before_use is not None:
        server.before_use()
    if not breaker.closed:
        return _answer_without_decision()
    try:
        decision = decide(limits, now=now)
    except UNDECIDED as error:
        note_failure(error)
        logger.error("There is no decision, so FAILURE_POLICY decides: %s", error)
        return _answer_without_decision()
    breaker.succeeded()
    return Answer(decision.allowed, decision, retry_after=decision.retry_after)


def is_known(key: str) -> bool:
    """Return whether Redis has the log of a key. Return True if it cannot be asked: then a failure policy decides."""
    if key in _known:
        return True
    if not breaker.closed:
        return True
    asked, call = current_server(), call_for([Limit(key, SlidingLog(1, Decimal(1)))])
    try:
        found = bool(asked.wire.call(StatesExist(asked.keyspace, call, 0), b""))
    except UNDECIDED as error:
        note_failure(error)
        return True
    breaker.succeeded()  # perhaps only one call may try: then the decision may follow it
    if found:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known.add(key)
    return found


def _answer_without_decision() -> Answer:
    if conf.FAILURE_POLICY == "deny":
        return Answer(False, retry_after=1.0, unavailable=True)  # ask clients to wait for a second
    return Answer(True)
