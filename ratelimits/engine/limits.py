"""The algorithms and their parameters, frozen: everything a decision needs to know about a limit.

Every algorithm is a frozen dataclass whose fields are those of the admin form and of RULE.json. Making one checks it:
a value that makes no sense raises ValueError with a sentence that says what to write instead. `rate` and the other
decimals have at most six places and are exact: 0.9 is nine tenths. Times are in seconds here and in whole
microseconds on the wire.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from decimal import Decimal, InvalidOperation
from enum import IntEnum
from fractions import Fraction
from math import ceil, lcm
from typing import Any, ClassVar

from ratelimits.engine import calendar

MICROSECONDS = 1_000_000
#: Longest time, in µs, that a state may run ahead: doubles hold integers exactly to 2**53, and "now" is there too.
HORIZON = 2**52
#: Most permits a capacity may hold.
MOST = 10**12
Params = tuple[int, ...]
# A month and a year have no one length.
_LENGTHS = {"hour": 3_600 * MICROSECONDS, "day": 86_400 * MICROSECONDS, "week": 604_800 * MICROSECONDS}


class Mode(IntEnum):
    """What a refusal by this limit means: the request is refused, or only recorded."""

    ENFORCE = 0
    SHADOW = 1


def exact(name: str, value: object, least: Decimal | int = 0, *, above: bool = False) -> Decimal:
    """A decimal as written, with at most six places and not below (or, with `above`, above) `least`."""
    try:
        number = value if isinstance(value, Decimal) else Decimal(str(value))
    except InvalidOperation as error:
        raise ValueError(f"{name} must be a number, not {value!r}") from error
    if isinstance(value, bool) or not number.is_finite():
        raise ValueError(f"{name} must be a number, not {value if isinstance(value, Decimal) else repr(value)}")
    if number < least or (above and number == least):
        raise ValueError(f"{name} must be {'above' if above else 'at least'} {least}, not {number}")
    if number > MOST:
        raise ValueError(f"{name} must be at most {MOST}, not {number}")
    if number != round(number, 6):
        raise ValueError(f"{name} has more than six decimal places: write {round(number, 6).normalize():f}")
    return number


def whole(name: str, value: object, least: int = 0, most: int = MOST) -> int:
    """A whole number from `least` to `most`."""
    number = exact(name, value)
    if number % 1:
        raise ValueError(f"{name} must be a whole number, not {value}")
    if not least <= number <= most:
        raise ValueError(f"{name} must be from {least} to {most}, not {number}")
    return int(number)


def _choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
    return str(value)


def _micros(seconds: Decimal) -> int:
    return int(seconds * MICROSECONDS)


@dataclass(frozen=True, slots=True)
class _Algorithm:
    """What all algorithms share. `code` names it on the wire, `script` the Lua file that holds it."""

    id: ClassVar[str]
    code: ClassVar[int]
    script: ClassVar[str]

    def __post_init__(self) -> None:
        self._check()

    def _check(self) -> None:
        raise NotImplementedError

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _set_capacity(self) -> None:
        self._set("capacity", whole("capacity", getattr(self, "capacity"), 1))  # noqa: B009

    def _set_period(self) -> None:
        period = exact("period", getattr(self, "period"), above=True)  # noqa: B009
        if _micros(period) > HORIZON:
            raise ValueError("period is longer than 142 years: write a shorter one")
        self._set("period", period)

    @property
    def shown(self) -> int | float:
        """The number that a decision reports as `limit`."""
        capacity: int = getattr(self, "capacity")  # noqa: B009
        return capacity

    @property
    def quota(self) -> tuple[int, int | None]:
        """What a client is told: permits, and the µs in which they all come back (None: no fixed length)."""
        capacity: int = getattr(self, "capacity")  # noqa: B009
        return capacity, None

    def params(self, now: int) -> Params:
        """The numbers handed to the script, at most eight; only calendars look at `now` (µs since 1970 UTC)."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class FixedWindow(_Algorithm):
    """At most `capacity` per window of `period` seconds, aligned to 1970 or opened by the first hit."""

    id = "fixed_window"
    code = 5
    script = "window"
    capacity: int
    period: Decimal
    window_start: str = "epoch"

    def _check(self) -> None:
        self._set_capacity()
        self._set_period()
        _choice("window_start", self.window_start, ("epoch", "first_hit"))

    @property
    def quota(self) -> tuple[int, int | None]:
        return self.capacity, _micros(self.period)

    def params(self, now: int) -> Params:
        return _micros(self.period), int(self.window_start == "first_hit"), 0, 0, 0, self.capacity


@dataclass(frozen=True, slots=True)
class CalendarWindow(_Algorithm):
    """At most `capacity` per calendar hour, day, week, month or year of a time zone, from an anchor's wall clock."""

    id = "calendar_window"
    code = 6
    script = "window"
    capacity: int
    calendar_unit: str
    timezone: str = "UTC"
    anchor: str | None = None

    def _check(self) -> None:
        self._set_capacity()
        calendar.boundaries(self.calendar_unit, self.timezone, self.anchor, 10**15)
        self._set("anchor", self.anchor or None)

    @property
    def quota(self) -> tuple[int, int | None]:
        return self.capacity, _LENGTHS.get(self.calendar_unit)

    def params(self, now: int) -> Params:
        return *calendar.boundaries(self.calendar_unit, self.timezone, self.anchor, now), 0, self.capacity


@dataclass(frozen=True, slots=True)
class SlidingWindow(_Algorithm):
    """At most `capacity` per `period`, in buckets that slide one at a time (Sentinel's LeapArray).

    `weighted` counts the bucket that is just leaving by its remaining share; with one sub-window that is the
    well-known approximation by two counters.
    """

    id = "sliding_window"
    code = 7
    script = "sliding_window"
    capacity: int
    period: Decimal
    sub_windows: int = 10
    weighted: bool = False

    def _check(self) -> None:
        self._set_capacity()
        self._set_period()
        self._set("sub_windows", whole("sub_windows", self.sub_windows, 1, 1000))
        if not isinstance(self.weighted, bool):
            raise ValueError(f"weighted must be true or false, not {self.weighted!r}")
        if _micros(self.period) % self.sub_windows:
            raise ValueError(
                f"period {self.period} does not divide into {self.sub_windows} sub_windows of whole microseconds"
            )

    @property
    def quota(self) -> tuple[int, int | None]:
        return self.capacity, _micros(self.period)

    def params(self, now: int) -> Params:
        return (
            _micros(self.period) // self.sub_windows,
            self.sub_windows,
            int(self.weighted),
            0,
            0,
            self.capacity,
        )


@dataclass(frozen=True, slots=True)
class SlidingLog(_Algorithm):
    """At most `capacity` in any interval of `period` seconds: exact, at the price of remembering every hit."""

    id = "sliding_log"
    code = 8
    script = "sliding_log"
    capacity: int
    period: Decimal

    def _check(self) -> None:
        self._set_capacity()
        self._set_period()

    @property
    def quota(self) -> tuple[int, int | None]:
        return self.capacity, _micros(self.period)

    def params(self, now: int) -> Params:
        return _micros(self.period), 0, 0, 0, 0, self.capacity


@dataclass(frozen=True, slots=True)
class _Paced(_Algorithm):
    """Limits of `rate` permits per `period` seconds: a permit takes period/rate, kept as a fraction of µs."""

    @property
    def interval(self) -> Fraction:
        """Microseconds that one permit takes, exactly."""
        rate: Decimal = getattr(self, "rate")  # noqa: B009
        period: Decimal = getattr(self, "period")  # noqa: B009
        return Fraction(_micros(period)) / Fraction(rate)

    def _set_pace(self, permits: int) -> None:
        self._set("rate", exact("rate", getattr(self, "rate"), above=True))  # noqa: B009
        self._set_period()
        if self.interval * permits > HORIZON:
            raise ValueError(
                "rate is so low that capacity takes more than 142 years to come back: raise rate or lower capacity"
            )
        if self.interval.denominator > HORIZON:
            raise ValueError("rate is too fine to be counted exactly: write it with fewer digits")

    def _split(self) -> tuple[int, int, int]:
        interval = self.interval
        return *divmod(interval.numerator, interval.denominator), interval.denominator


@dataclass(frozen=True, slots=True)
class _Level(_Paced):
    capacity: int
    rate: Decimal
    period: Decimal

    script = "level"

    def _check(self) -> None:
        self._set_capacity()
        self._set_pace(self.capacity + 1)

    @property
    def quota(self) -> tuple[int, int | None]:
        return self.capacity, ceil(self.interval * self.capacity)

    def _params(self, room: int, extra: int) -> Params:
        limit = self.interval * room
        full, part = divmod(
            limit.numerator * (self.interval.denominator // limit.denominator), self.interval.denominator
        )
        return *self._split(), full, part, self.capacity, extra

    def params(self, now: int) -> Params:
        return self._params(self.capacity, 0)


@dataclass(frozen=True, slots=True)
class TokenBucket(_Level):
    """`capacity` tokens, refilled at rate/period, `initial` of them there at the start; refuses when too few."""

    id = "token_bucket"
    code = 1
    initial: int | str = "full"

    def _check(self) -> None:
        _Level._check(self)
        if self.initial not in ("full", "empty"):
            try:
                self._set("initial", whole("initial", self.initial, 0, self.capacity))
            except ValueError as error:
                raise ValueError(f"initial must be full, empty or a whole number of tokens: {error}") from error

    def params(self, now: int) -> Params:
        tokens = {"full": self.capacity, "empty": 0}.get(str(self.initial))
        return self._params(self.capacity, self.capacity - (int(self.initial) if tokens is None else tokens))


@dataclass(frozen=True, slots=True)
class Gcra(_Level):
    """The same limit kept as a theoretical arrival time: ITU-T I.371's Generic Cell Rate Algorithm, as in redis-cell.

    `capacity` is redis-cell's max_burst + 1.
    """

    id = "gcra"
    code = 2


@dataclass(frozen=True, slots=True)
class LeakyBucket(_Level):
    """As a meter: the level drains at rate/period; what would overflow `capacity` is refused."""

    id = "leaky_bucket"
    code = 3


@dataclass(frozen=True, slots=True)
class LeakyBucketQueue(_Level):
    """As a queue: answers when to proceed, period/rate apart, `capacity` waiting, `delay_after` unspaced.

    That is nginx's limit_req with burst=capacity and delay=delay_after.
    """

    id = "leaky_bucket_queue"
    code = 4
    delay_after: int = 0

    def _check(self) -> None:
        # A queue of none is a limit too: one proceeds, nobody waits.
        self._set("capacity", whole("capacity", self.capacity, 0))
        self._set_pace(self.capacity + 1)
        self._set("delay_after", whole("delay_after", self.delay_after, 0, self.capacity))

    @property
    def quota(self) -> tuple[int, int | None]:
        return self.capacity + 1, ceil(self.interval * (self.capacity + 1))

    def params(self, now: int) -> Params:
        return self._params(self.capacity + 1, self.delay_after)


@dataclass(frozen=True, slots=True)
class _Smooth(_Paced):
    rate: Decimal
    period: Decimal

    script = "smooth"

    @property
    def quota(self) -> tuple[int, int | None]:
        permits = ceil(self.rate)
        return permits, ceil(self.interval * permits)

    @property
    def shown(self) -> int | float:
        return int(self.rate) if self.rate % 1 == 0 else float(self.rate)

    def _check_stored(self, field: str, time: Fraction) -> None:
        """What idleness stores, `time` in µs, must be a number of permits and a length that are counted exactly."""
        if time > HORIZON:
            raise ValueError(f"{field} is too long: what is saved up would be worth more than 142 years")
        if time / self.interval > MOST:
            raise ValueError(f"{field} is too long at this rate: more than {MOST} permits would be saved up")


@dataclass(frozen=True, slots=True)
class SmoothBursty(_Smooth):
    """Guava's SmoothBursty: borrows from the future, the next caller pays; stores `max_burst_seconds` of idleness."""

    id = "smooth_bursty"
    code = 9
    max_burst_seconds: Decimal = Decimal(1)

    def _check(self) -> None:
        self._set_pace(1)
        self._set("max_burst_seconds", exact("max_burst_seconds", self.max_burst_seconds))
        self._check_stored("max_burst_seconds", Fraction(_micros(self.max_burst_seconds)))

    def params(self, now: int) -> Params:
        return *self._split(), _micros(self.max_burst_seconds)


@dataclass(frozen=True, slots=True)
class SmoothWarmingUp(_Smooth):
    """Guava's SmoothWarmingUp: after idleness the rate climbs from rate/cold_factor to rate over `warm_up` seconds."""

    id = "smooth_warming_up"
    code = 10
    script = "smooth_warming_up"
    warm_up: Decimal = Decimal(1)
    cold_factor: Decimal = Decimal(3)

    def _check(self) -> None:
        self._set_pace(1)
        self._set("warm_up", exact("warm_up", self.warm_up, above=True))
        self._set("cold_factor", exact("cold_factor", self.cold_factor, 1))
        cold = Fraction(self.cold_factor)
        self._check_stored("warm_up", _micros(self.warm_up) * Fraction(5 + cold, 2 * (1 + cold)))
        if self.interval * cold > HORIZON:
            raise ValueError("a permit would take more than 142 years when cold: raise rate or lower cold_factor")
        if self.params(0)[3] * (self.interval.denominator) > HORIZON:
            raise ValueError("rate and cold_factor together are too fine: write them with fewer decimal places")

    def params(self, now: int) -> Params:
        """q, r, n of the interval, then what brings its fractions to the common denominator of all warm-up times."""
        cold = Fraction(self.cold_factor)
        gain = Fraction(5 + cold, 2 * (1 + cold))
        ceiling = _micros(self.warm_up) * gain
        finest = lcm(self.interval.denominator, 2, gain.denominator, ceiling.denominator)
        return (
            *self._split(),
            finest // self.interval.denominator,
            _micros(self.warm_up),
            _micros(self.cold_factor),
            gain.numerator,
            gain.denominator,
        )


@dataclass(frozen=True, slots=True)
class Concurrency(_Algorithm):
    """At most `capacity` in flight; a lease that is not released ends by itself after `lease_ttl` seconds."""

    id = "concurrency"
    code = 11
    script = "concurrency"
    capacity: int
    lease_ttl: Decimal = Decimal(60)

    def _check(self) -> None:
        self._set_capacity()
        self._set("lease_ttl", exact("lease_ttl", self.lease_ttl, above=True))
        if _micros(self.lease_ttl) > HORIZON:
            raise ValueError("lease_ttl is longer than 142 years: write a shorter one")

    def params(self, now: int) -> Params:
        return _micros(self.lease_ttl), 0, 0, 0, 0, self.capacity


Algorithm = (
    FixedWindow
    | CalendarWindow
    | SlidingWindow
    | SlidingLog
    | TokenBucket
    | Gcra
    | LeakyBucket
    | LeakyBucketQueue
    | SmoothBursty
    | SmoothWarmingUp
    | Concurrency
)
ALGORITHMS: dict[str, type[Algorithm]] = {
    kind.id: kind
    for kind in (
        FixedWindow,
        CalendarWindow,
        SlidingWindow,
        SlidingLog,
        TokenBucket,
        Gcra,
        LeakyBucket,
        LeakyBucketQueue,
        SmoothBursty,
        SmoothWarmingUp,
        Concurrency,
    )
}


#: What the admin form asks beside the algorithm's own fields; it changes no number of a replay.
_FORM = {"name", "plan", "scope", "key_kind", "meter", "mode", "bills", "on_failure", "max_wait"}


def fields_of(algorithm: str) -> tuple[str, ...]:
    """The field names that an algorithm takes, in the order of its class; ValueError for an unknown algorithm."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {algorithm!r}: use one of {', '.join(ALGORITHMS)}")
    return tuple(field.name for field in fields(ALGORITHMS[algorithm]))


def algorithm_from_json(data: Any) -> Algorithm:
    """The algorithm that RULE.json (a dict of the admin form's fields) describes; ValueError says what is wrong."""
    if not isinstance(data, dict):
        raise ValueError(
            'a rule is an object such as {"algorithm": "token_bucket", "capacity": 10, "rate": 5, "period": 1}'
        )
    rest = dict(data)
    name = rest.pop("algorithm", None)
    if name is None:
        raise ValueError(f"a rule needs an algorithm: one of {', '.join(ALGORITHMS)}")
    kind = ALGORITHMS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"unknown algorithm {name!r}: use one of {', '.join(ALGORITHMS)}")
    known = fields_of(name)
    every = {field for other in ALGORITHMS for field in fields_of(other)} | _FORM
    for field in rest:
        if field not in every:
            raise ValueError(f"unknown field {field!r}: {name} takes {', '.join(known)}")
    given = {field: rest[field] for field in known if rest.get(field) is not None}
    missing = [field.name for field in fields(kind) if field.name not in given and field.default is MISSING]
    if missing:
        raise ValueError(f"{name} needs {' and '.join(missing)}")
    return kind(**given)


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit of a request: whose permits (`key`, such as "user:42"), by which algorithm, and how many.

    The state of a key is kept under `name`. `rule` and `version` say in the usage which row, at which configuration
    version, decided; `since` (µs since 1970 UTC) is when these parameters came into force, for states written under
    others: time before it counts under the old ones. 0 means from this decision on.
    """

    key: str
    algorithm: Algorithm
    name: str = "default"
    cost: int = 1
    mode: Mode = Mode.ENFORCE
    rule: int = 0
    version: int = 0
    since: int = 0
