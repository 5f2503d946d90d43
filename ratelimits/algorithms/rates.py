"""Algorithms with a rate: `rate` permits per `period` seconds. The time that a permit takes is an exact fraction."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from math import ceil, lcm

from ratelimits.algorithms import typed_numbers
from ratelimits.algorithms.base import (
    HORIZON,
    MAX_PERMITS,
    Algorithm,
    Bounded,
    Params,
    Wording,
    exact,
    gettext_noop,
    length,
    micros,
    number,
    whole,
)


def _check_countable(interval: Fraction, permits: int) -> None:
    """Raise ValueError if this number of permits cannot be counted exactly. A permit takes `interval` µs."""
    if interval * permits > HORIZON:
        raise ValueError(
            "rate is so low that capacity takes more than 142 years to come back: raise rate or lower capacity"
        )
    if interval.denominator > HORIZON:
        raise ValueError("rate is too fine to be counted exactly: write it with fewer digits")


def _split(interval: Fraction) -> tuple[int, int, int]:
    """Return whole numbers q, r and n: the interval is q + r/n µs, and r is below n."""
    return *divmod(interval.numerator, interval.denominator), interval.denominator


class _Paced(Algorithm):
    """A limit of `rate` permits per `period`. Its subclasses are dataclasses with these two fields."""

    __slots__ = ()
    rate: Decimal
    period: Decimal

    @property
    def interval(self) -> Fraction:
        """Return the exact time in µs that one permit takes."""
        return Fraction(micros(self.period)) / Fraction(self.rate)

    def _check_pace(self, permits: int) -> None:
        """Raise ValueError if `rate` or `period` is wrong, or if this number of permits cannot be counted exactly."""
        self._set("rate", exact("rate", self.rate, above=True))
        self._set("period", length("period", self.period))
        _check_countable(self.interval, permits)


@dataclass(frozen=True, slots=True)
class _Level(_Paced, Bounded):
    """A limit that lua/algorithms/level.lua decides: each charge adds to a debt, which becomes smaller with time."""

    rate: Decimal
    period: Decimal

    script = "level"

    def _check(self) -> None:
        Bounded._check(self)
        self._check_pace(self.capacity + 1)  # a queue has one permit more than its capacity

    def sentence(self, words: Wording, unit: str) -> list[str]:
        bursts = words.gettext("bursts to %(capacity)s") % {"capacity": number(self.capacity)}
        return [words.pace(self.rate, self.period, unit), bursts]

    @property
    def quota(self) -> tuple[int, int | None]:
        return self.capacity, ceil(self.interval * self.capacity)

    def _params(self, permits: int, spent_or_undelayed: int) -> Params:
        """Return the numbers that lua/algorithms/level.lua describes.

        One of them is the room, the longest debt that is allowed. It is the time that this number of `permits` takes.
        `spent_or_undelayed` is the number of permits that a new bucket has already spent. For a queue it is the number
        of requests that do not wait.
        """
        room = self.interval * permits
        denominator = self.interval.denominator  # a multiple of the room's denominator
        whole_room, part = divmod(room.numerator * (denominator // room.denominator), denominator)
        return *_split(self.interval), whole_room, part, self.capacity, spent_or_undelayed

    def params(self, now: int) -> Params:
        return self._params(self.capacity, 0)

    def record_form(self, params: Params) -> str:
        _q, _r, n, *_others = params
        if n == 1:
            return "whole"
        return "fraction" if n < 2**32 else ""  # A record of the form "fraction" has four bytes for n.


@dataclass(frozen=True, slots=True)
class TokenBucket(_Level):
    """A bucket for at most `capacity` tokens, with `initial` tokens at the start. It gets `rate` tokens per `period`.

    A request takes tokens. If there are too few, the request is refused.
    """

    id = "token_bucket"
    label = gettext_noop("token bucket")
    explanation = gettext_noop(
        "The usual choice. Permits come back at a steady rate, and are saved up to the capacity. So short bursts pass."
    )
    code = 1
    may_wait = True
    initial: int | str = "full"

    def _check(self) -> None:
        _Level._check(self)
        if self.initial not in ("full", "empty"):
            try:
                # An override can set the capacity to 0 without changing `initial`. Then the bucket starts empty.
                tokens = typed_numbers.whole(self.initial) if isinstance(self.initial, str) else self.initial
                initial = whole("initial", tokens, 0, self.capacity or MAX_PERMITS)
                self._set("initial", min(initial, self.capacity))
            except ValueError as error:
                raise ValueError(f"initial must be full, empty or a whole number of tokens: {error}") from error

    def sentence(self, words: Wording, unit: str) -> list[str]:
        parts = _Level.sentence(self, words, unit)
        if self.initial == "empty":
            parts.append(words.gettext("empty at the start"))
        elif self.initial != "full":
            parts.append(words.gettext("%(initial)s at the start") % {"initial": number(int(self.initial))})
        return parts

    def params(self, now: int) -> Params:
        tokens_of_word = {"full": self.capacity, "empty": 0}
        tokens = tokens_of_word[self.initial] if isinstance(self.initial, str) else self.initial
        return self._params(self.capacity, self.capacity - tokens)


@dataclass(frozen=True, slots=True)
class Gcra(_Level):
    """The same limit as a token bucket, by the Generic Cell Rate Algorithm of ITU-T I.371.

    In the terms of the Redis module redis-cell, `capacity` is max_burst + 1.
    """

    id = "gcra"
    label = gettext_noop("GCRA")
    explanation = gettext_noop(
        "The same limit as a token bucket. Choose it if you know this algorithm from redis-cell."
    )
    code = 2
    may_wait = True


@dataclass(frozen=True, slots=True)
class LeakyBucket(_Level):
    """A bucket that loses `rate` permits per `period`. Each request adds its permits.

    A request is refused if the bucket would then have more than `capacity` permits.
    """

    id = "leaky_bucket"
    label = gettext_noop("leaky bucket")
    explanation = gettext_noop(
        "Each request adds to a bucket, which empties at a steady rate. A request that does not fit is refused."
    )
    code = 3

    def sentence(self, words: Wording, unit: str) -> list[str]:
        bucket = words.gettext("from a leaky bucket of %(capacity)s") % {"capacity": number(self.capacity)}
        return [words.pace(self.rate, self.period, unit), bucket]


@dataclass(frozen=True, slots=True)
class LeakyBucketQueue(_Level):
    """A leaky bucket as a queue: one request proceeds every period/rate seconds, and at most `capacity` requests wait.

    The first `delay_after` requests do not wait. This is limit_req of nginx with burst=capacity and delay=delay_after,
    with one difference: with capacity 0 no request passes, as for every algorithm here.
    """

    id = "leaky_bucket_queue"
    label = gettext_noop("leaky bucket as a queue")
    explanation = gettext_noop(
        "Requests wait in a queue, and proceed one by one at a steady rate. If the queue is full, a request is refused."
    )
    code = 4
    may_wait = True
    needs_max_wait = True
    may_be_full = True
    delay_after: int = 0

    def _check(self) -> None:
        _Level._check(self)
        delay_after = whole("delay_after", self.delay_after, 0, self.capacity or MAX_PERMITS)
        self._set("delay_after", min(delay_after, self.capacity))

    def sentence(self, words: Wording, unit: str) -> list[str]:
        _ = words.gettext
        parts = [words.pace(self.rate, self.period, unit), _("one by one")]
        if self.delay_after:
            parts.append(_("the first %(n)s at once") % {"n": number(self.delay_after)})
        return [*parts, _("at most %(capacity)s waiting") % {"capacity": number(self.capacity)}]

    @property
    def _places(self) -> int:
        """Return the number of requests that can be admitted together: one proceeds, `capacity` wait."""
        return self.capacity + 1 if self.capacity else 0

    @property
    def suggested_max_wait(self) -> Decimal:
        return self.capacity * self.period / self.rate

    @property
    def quota(self) -> tuple[int, int | None]:
        return self._places, ceil(self.interval * self._places)

    def params(self, now: int) -> Params:
        return self._params(self._places, self.delay_after)


@dataclass(frozen=True, slots=True)
class _Smooth(_Paced):
    """A limit with a store: permits that were saved while no request came. It works like a `RateLimiter` of Guava.

    Guava is a Java library of Google. See lua/algorithms/smooth.lua.
    """

    rate: Decimal
    period: Decimal

    script = "smooth"
    may_wait = True
    needs_max_wait = True

    @property
    def quota(self) -> tuple[int, int | None]:
        permits = ceil(self.rate)
        return permits, ceil(self.interval * permits)

    @property
    def shown_limit(self) -> int | float:
        return int(self.rate) if self.rate % 1 == 0 else float(self.rate)

    @property
    def can_be_undone(self) -> bool:
        # A refund does not put permits back into the store (see lua/algorithms/smooth.lua).
        return False

    @property
    def max_cost(self) -> int:
        """Return the number of permits that take 142 years (HORIZON). Longer times would not be exact."""
        return int(HORIZON / self.interval)

    def _check_stored(self, field: str, time: Fraction) -> None:
        """Raise ValueError if a full store cannot be counted exactly. The permits of a full store take `time` (µs)."""
        if time > HORIZON:
            raise ValueError(f"{field} is too long: the saved permits would take more than 142 years")
        if time / self.interval > MAX_PERMITS:
            raise ValueError(f"{field} is too long at this rate: more than {MAX_PERMITS} permits would be saved up")


@dataclass(frozen=True, slots=True)
class SmoothBursty(_Smooth):
    """Guava's SmoothBursty: each request makes the next request wait.

    A request does not wait for its own permits: the next request waits for the time that these permits take. While no
    request comes, permits are saved, up to the permits of `max_burst_seconds`.
    """

    id = "smooth_bursty"
    label = gettext_noop("smooth, with bursts")
    explanation = gettext_noop(
        "Requests wait until the rate allows them. While no request comes, permits are saved for a burst (as in Guava)."
    )
    code = 9
    max_burst_seconds: Decimal = Decimal(1)

    def _check(self) -> None:
        self._check_pace(1)
        self._set("max_burst_seconds", exact("max_burst_seconds", self.max_burst_seconds))
        self._check_stored("max_burst_seconds", Fraction(micros(self.max_burst_seconds)))

    def sentence(self, words: Wording, unit: str) -> list[str]:
        saved = words.gettext("saving the permits of up to %(span)s") % {"span": words.span(self.max_burst_seconds)}
        return [words.pace(self.rate, self.period, unit), saved]

    @property
    def suggested_max_wait(self) -> Decimal:
        return self.max_burst_seconds

    def params(self, now: int) -> Params:
        return *_split(self.interval), micros(self.max_burst_seconds)

    def record_form(self, params: Params) -> str:
        _q, _r, n, _store = params
        return "bursty" if n < 2**32 else "large_bursty"


@dataclass(frozen=True, slots=True)
class SmoothWarmingUp(_Smooth):
    """Guava's SmoothWarmingUp: after a time without requests, the rate rises slowly.

    The rate begins at rate/cold_factor, and reaches `rate` after `warm_up` seconds.
    """

    id = "smooth_warming_up"
    label = gettext_noop("smooth, warming up")
    explanation = gettext_noop(
        "Requests wait until the rate allows them. After a time without requests the rate rises slowly. Choose it for"
        " servers that need to warm up."
    )
    code = 10
    script = "smooth_warming_up"
    builds_on = ("smooth",)
    warm_up: Decimal = Decimal(1)
    cold_factor: Decimal = Decimal(3)

    def _check(self) -> None:
        self._check_pace(1)
        self._set("warm_up", exact("warm_up", self.warm_up, above=True))
        self._set("cold_factor", exact("cold_factor", self.cold_factor, 1))
        cold = Fraction(self.cold_factor)
        self._check_stored("warm_up", micros(self.warm_up) * self._saving_rate)
        if self.interval * cold > HORIZON:
            raise ValueError("a permit would take more than 142 years when cold: raise rate or lower cold_factor")
        _q, _r, interval_denominator, factor, *_others = self.params(0)
        common_denominator = factor * interval_denominator
        if common_denominator > HORIZON:
            raise ValueError("rate and cold_factor together are too fine: write them with fewer decimal places")

    def sentence(self, words: Wording, unit: str) -> list[str]:
        shown = {"span": words.span(self.warm_up), "factor": number(self.cold_factor)}
        warming = words.gettext("warming up over %(span)s from 1/%(factor)s of this rate") % shown
        return [words.pace(self.rate, self.period, unit), warming]

    @property
    def suggested_max_wait(self) -> Decimal:
        return self.warm_up

    @property
    def _saving_rate(self) -> Fraction:
        """Return the time (µs) that is added to the store in each µs without requests. Guava has the same formula.

        The store is counted as a time: the number of saved permits times `interval`.
        """
        cold = Fraction(self.cold_factor)
        return (5 + cold) / (2 * (1 + cold))

    def params(self, now: int) -> Params:
        """Return the eight numbers that lua/algorithms/smooth_warming_up.lua describes."""
        saving_rate = self._saving_rate
        full_store = micros(self.warm_up) * saving_rate
        common_denominator = lcm(self.interval.denominator, 2, saving_rate.denominator, full_store.denominator)
        return (
            *_split(self.interval),
            common_denominator // self.interval.denominator,
            micros(self.warm_up),
            micros(self.cold_factor),
            saving_rate.numerator,
            saving_rate.denominator,
        )

    def record_form(self, params: Params) -> str:
        _q, _r, n, factor, _warm_up, cold, top, bottom = params
        return "warming" if max(n, factor, cold, top, bottom) < 2**32 else "large_warming"
