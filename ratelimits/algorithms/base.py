"""The base class of all algorithms, with the numbers and the texts of their parameters.

An algorithm has the parameters of a limit. It checks them, writes them as numbers for the Lua script, and describes
them in a sentence. For a value that is not valid, the functions that check numbers raise ValueError with a sentence
that says what to write instead. The sentence begins with `name`, the name of the field.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import ClassVar, NamedTuple

from ratelimits.algorithms.billing_periods import PeriodTerms

#: Microseconds in a second.
MICROSECONDS = 1_000_000
#: Maximum length of a span in µs. The Lua script adds a span to the present moment. It calculates with doubles, and
#: doubles are exact for whole numbers up to 2**53.
HORIZON = 2**52
#: Maximum capacity. No other number of a rule can be larger.
MAX_PERMITS = 10**12


def exact(name: str, value: object, minimum: Decimal | int = 0, *, above: bool = False) -> Decimal:
    """Return a value as a decimal with at most six places.

    The value must be from `minimum` to MAX_PERMITS. If `above` is true, it must be above `minimum`.
    """
    try:
        if isinstance(value, str) and ("_" in value or not value.isascii()):
            raise InvalidOperation  # Decimal would accept "1_0" and digits of other writing systems
        number = value if isinstance(value, Decimal) else Decimal(str(value))
    except (InvalidOperation, ValueError) as error:
        raise ValueError(f"{name} must be a number, not {value!r}") from error
    if isinstance(value, bool) or not number.is_finite():
        raise ValueError(f"{name} must be a number, not {value if isinstance(value, Decimal) else repr(value)}")
    if number < minimum or (above and number == minimum):
        raise ValueError(f"{name} must be {'above' if above else 'at least'} {minimum}, not {number}")
    if number > MAX_PERMITS:
        raise ValueError(f"{name} must be at most {MAX_PERMITS}, not {number}")
    if number != round(number, 6):
        raise ValueError(f"{name} has more than six decimal places: write {round(number, 6).normalize():f}")
    return number


def whole(name: str, value: object, minimum: int = 0, maximum: int = MAX_PERMITS) -> int:
    """Return a value as a whole number. It must be from `minimum` to `maximum`."""
    number = exact(name, value)
    if number % 1:
        raise ValueError(f"{name} must be a whole number, not {value}")
    if not minimum <= number <= maximum:
        raise ValueError(f"{name} must be from {minimum} to {maximum}, not {number}")
    return int(number)


def choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """Return a value as a str. It must be one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
    return str(value)


def micros(seconds: Decimal) -> int:
    """Return a length of time in seconds as whole µs."""
    return int(seconds * MICROSECONDS)


def length(name: str, value: object) -> Decimal:
    """Return a length of time in seconds. It must be above 0 and at most HORIZON, which is in µs."""
    seconds = exact(name, value, above=True)
    if micros(seconds) > HORIZON:
        raise ValueError(f"{name} is longer than 142 years: write a shorter one")
    return seconds


def gettext_noop(text: str) -> str:
    """Return the text unchanged. Django's `makemessages` collects the texts in calls of a function with this name."""
    return text


def number(value: Decimal | int) -> str:
    """Return a number as text, without trailing zeros and with commas between thousands."""
    return f"{Decimal(value).normalize():,f}"


def amount(value: Decimal | int, unit: str) -> str:
    """Return a number with its unit as text: "1 request", "2 requests"."""
    if value == 1 and unit.endswith("s") and not unit.endswith("ss"):
        unit = unit[:-1]
    return f"{number(value)} {unit}"


@dataclass(frozen=True, slots=True)
class Wording:
    """Writes texts in one language. `gettext` and `ngettext` translate texts, as Django's functions do."""

    gettext: Callable[[str], str]
    ngettext: Callable[[str, str, int], str]

    def span(self, seconds: Decimal, *, bare: bool = False) -> str:
        """Return a length of time as text: "30 days". If `bare` is true, return "day" for one day, as in "per day"."""
        for size, unit_of, number_of in _SPANS:
            count = seconds / size
            if count == 1 and bare:
                return unit_of(self)
            # Write weeks only for exactly one week, because people say "14 days" and not "2 weeks".
            if count >= 1 and not count % 1 and (size < 604_800 or count == 1):
                return number_of(self, int(count)) % {"n": number(count)}
        plural = 2  # "0.5 seconds" has the plural, as "2 seconds" has
        return number_of(self, plural) % {"n": number(seconds)}

    def pace(self, rate: Decimal, period: Decimal, unit: str) -> str:
        """Return a rate as text: "5 requests per second"."""
        shown = {"amount": amount(rate, unit), "span": self.span(period, bare=True)}
        return self.gettext("%(amount)s per %(span)s") % shown


#: For each unit of time: its length in seconds, a function that returns its name, and a function that returns the text
#: for a number of these units.
_SPANS: tuple[tuple[int, Callable[[Wording], str], Callable[[Wording, int], str]], ...] = (
    (604_800, lambda words: words.gettext("week"), lambda words, n: words.ngettext("%(n)s week", "%(n)s weeks", n)),
    (86_400, lambda words: words.gettext("day"), lambda words, n: words.ngettext("%(n)s day", "%(n)s days", n)),
    (3_600, lambda words: words.gettext("hour"), lambda words, n: words.ngettext("%(n)s hour", "%(n)s hours", n)),
    (60, lambda words: words.gettext("minute"), lambda words, n: words.ngettext("%(n)s minute", "%(n)s minutes", n)),
    (1, lambda words: words.gettext("second"), lambda words, n: words.ngettext("%(n)s second", "%(n)s seconds", n)),
)


#: The numbers that the Lua script gets for a limit. The line "--@params" of the algorithm's Lua file names them.
Params = tuple[int, ...]


class Storage(NamedTuple):
    """Where the state of a limit is stored in Redis. engine/keys.py makes the Redis keys.

    packed    whether the limit has a record in the packed state, a string that several limits of one key share
    own       the letter in the name of the Redis key that belongs to the limit alone; "" if there is no such key
    endings   suffixes of further Redis keys, by name. The Lua file writes "${name}" instead of the suffix
    optional  suffixes of further Redis keys that the script uses if its node has them. They are not in KEYS: while a
              cluster moves a slot, a node refuses a script if it does not have all KEYS
    """

    packed: bool = True
    own: str = ""
    endings: Mapping[str, str] = {}
    optional: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Algorithm(ABC):
    """The parameters of a limit, and everything that differs between algorithms.

    A new algorithm needs a subclass, a Lua file and a line in algorithms/limits.py. All other code uses only the
    attributes and methods below, so it does not depend on a single algorithm.
    """

    #: The algorithm's name in the database and in rule files (JSON).
    id: ClassVar[str]
    #: The name that people see.
    label: ClassVar[str]
    #: A short text for people who choose an algorithm; "" if there is none.
    explanation: ClassVar[str] = ""
    #: The number of the algorithm in Redis, from 1 to 255. Never use the number of another algorithm, even of a removed
    #: one.
    code: ClassVar[int]
    #: The name of the Lua file in lua/algorithms.
    script: ClassVar[str]
    #: Names of Lua files that must be loaded before the file `script`.
    builds_on: ClassVar[tuple[str, ...]] = ()
    #: Where the state is stored.
    storage: ClassVar[Storage] = Storage()
    #: Whether an admitted request gets a lease, which ends with the request.
    leases: ClassVar[bool] = False
    #: Whether a refusal stays right until its retry_after has passed. If so, a process can repeat the refusal from its
    #: memory.
    refusals_stand: ClassVar[bool] = True
    #: When a process may take permits in advance (prefetch): the name of a field, and the values of this field with
    #: which prefetching is safe. {} means that it is always safe, and None means that it is never safe. It is safe only
    #: if all permits come back at one moment. If they came back one by one, new permits and prefetched permits together
    #: could exceed the limit.
    prefetch_where: ClassVar[Mapping[str, tuple[str, ...]] | None] = None
    #: Whether the algorithm can admit a request for a later moment. If not, a rule cannot have a max_wait.
    may_wait: ClassVar[bool] = False
    #: Whether a rule must have a max_wait.
    needs_max_wait: ClassVar[bool] = False
    #: Whether the limit has a queue of limited length: it refuses a request if too many other requests wait.
    may_be_full: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._check()

    @abstractmethod
    def _check(self) -> None:
        """Raise ValueError for parameters that are not valid."""

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    @abstractmethod
    def shown_limit(self) -> int | float:
        """Return the number that a decision reports as `limit`."""

    @property
    def admits_nothing(self) -> bool:
        """Return whether the limit refuses every request."""
        return False

    @property
    @abstractmethod
    def quota(self) -> tuple[int, int | None]:
        """Return the numbers for clients: the permits, and the µs until all permits have come back.

        The second number is None if this span has no fixed length, such as a month.
        """

    @abstractmethod
    def sentence(self, words: Wording, unit: str) -> list[str]:
        """Return the parts of a sentence that describes the limit. `unit` is a word for permits, such as "requests"."""

    @property
    def may_prefetch(self) -> bool:
        """Return whether permits of this limit can be prefetched."""
        where = self.prefetch_where
        return where is not None and all(getattr(self, name) in values for name, values in where.items())

    @property
    def can_be_undone(self) -> bool:
        """Return whether a refund fully restores the state before the charge."""
        return True

    @property
    def max_cost(self) -> int | None:
        """Return the maximum cost of one request; None if there is only the general maximum (see quota/costs.py)."""
        return None

    @property
    def suggested_max_wait(self) -> Decimal | None:
        """Return a max_wait in seconds that fits the limit's numbers; None if the algorithm suggests none."""
        return None

    @abstractmethod
    def params(self, now: int) -> Params:
        """Return at most eight numbers for the Lua script at `now` (µs since 1970 UTC).

        Algorithms with the same Lua file return equally many numbers. A number that an algorithm does not need is 0.
        """

    def valid_span(self, now: int) -> tuple[int, int] | None:
        """Return start and end (µs since 1970 UTC) of the span for which `params(now)` is valid.

        None means that `params(now)` is always valid.
        """
        return None

    def record_form(self, params: Params) -> str:
        """Return the name of the form in which Redis usually stores a state with these `params`; "" if there is none.

        The algorithm's Lua file describes each form in a line "--@record <name> ...". If a form has no fixed size, the
        result ends with a colon and the size of its varying part in bytes, such as "counts:66".
        """
        return ""

    @property
    def follows_billing(self) -> bool:
        """Return whether the limit counts in the billing periods of the account that makes the request."""
        return False

    def in_periods_of(self, terms: PeriodTerms) -> Algorithm:
        """Return the limit for an account with these terms. Only a limit that follows billing depends on them."""
        return self

    def month_at(self, moment: int) -> tuple[int, int] | None:
        """Return start and end (µs) of the month that contains a moment; None if the limit has no calendar months."""
        return None


@dataclass(frozen=True, slots=True)
class Bounded(Algorithm):
    """A limit with a capacity: the number of its permits when no permit is taken. With capacity 0 no request passes."""

    capacity: int

    def _check(self) -> None:
        self._set("capacity", whole("capacity", self.capacity))

    @property
    def shown_limit(self) -> int:
        return self.capacity

    @property
    def admits_nothing(self) -> bool:
        return self.capacity == 0

    @property
    def quota(self) -> tuple[int, int | None]:
        return self.capacity, None
