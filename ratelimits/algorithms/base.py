"""The base class of all algorithms.

An algorithm has the parameters of a limit. It checks them, and writes them as numbers for the Lua script.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import ClassVar, NamedTuple

from ratelimits.algorithms.billing_periods import PeriodTerms
from ratelimits.algorithms.parsing import whole
from ratelimits.algorithms.wording import Wording

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
