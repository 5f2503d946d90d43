"""The base class of all algorithms: the parameters of a limit, their checks, and their form for the Lua script."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import ClassVar, NamedTuple

from ratelimits.algorithms.parsing import whole
from ratelimits.algorithms.wording import Wording

Params = tuple[int, ...]


class Storage(NamedTuple):
    """Where the state of a limit is stored in Redis. engine/keys.py makes the Redis keys.

    packed    whether some of the state is in the string that all limits of one key share (the packed state)
    own       the letter in the name of the limit's own Redis key; "" if it has none
    endings   suffixes for further Redis keys. The Lua file writes each of them as "${name}" with its name here
    """

    packed: bool = True
    own: str = ""
    endings: Mapping[str, str] = {}


class FastPath(NamedTuple):
    """A limit in the form for lua/fast.lua: size and struct format of its record in a packed state, and its numbers."""

    size: int
    format: str
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Algorithm(ABC):
    """The numbers of a limit, and everything that differs between algorithms.

    A new algorithm needs a subclass, a Lua file and a line in algorithms/limits.py. All other code uses only the
    attributes below, and never asks which algorithm a limit has.
    """

    #: The algorithm's name in the database and in rule files (JSON).
    id: ClassVar[str]
    #: The name that people see.
    label: ClassVar[str]
    #: One sentence for people who choose an algorithm; "" if there is none.
    explanation: ClassVar[str] = ""
    #: The number that stands for the algorithm in Redis, from 1 to 255. Never use a number again for another algorithm.
    code: ClassVar[int]
    #: The name of the Lua file in lua/algorithms.
    script: ClassVar[str]
    #: Names of the Lua files that must be loaded before it.
    builds_on: ClassVar[tuple[str, ...]] = ()
    #: Whether lua/fast.lua can decide the algorithm, at least with some parameters.
    has_fast_path: ClassVar[bool] = False
    #: Where the state is stored.
    storage: ClassVar[Storage] = Storage()
    #: Whether an admitted request holds a lease, which ends with the request.
    leases: ClassVar[bool] = False
    #: Whether a refusal stays right until its retry_after has passed. If so, a process may repeat it from memory.
    refusals_stand: ClassVar[bool] = True
    #: Says whether a process may take permits in advance (prefetch). None means never, {} means always. Other values
    #: mean: only if each of these fields has one of these values. All permits must come back at one moment. If they
    #: came back one by one, new permits and prefetched permits together could exceed the limit.
    prefetch_where: ClassVar[Mapping[str, tuple[str, ...]] | None] = None
    #: Whether a request can be admitted for a later moment. Only then a rule can have a max_wait.
    may_wait: ClassVar[bool] = False
    #: Whether a rule must have a max_wait.
    needs_max_wait: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._check()

    @abstractmethod
    def _check(self) -> None:
        """Raise ValueError for parameters that are not valid."""

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    @abstractmethod
    def shown(self) -> int | float:
        """Return the number that a decision reports as `limit`."""

    @property
    def closed(self) -> bool:
        """Return whether the limit refuses every request."""
        return False

    @property
    @abstractmethod
    def quota(self) -> tuple[int, int | None]:
        """Return the numbers for clients: permits, and the µs in which all of them come back (None: no fixed time)."""

    @abstractmethod
    def sentence(self, words: Wording, unit: str) -> list[str]:
        """Return the parts of a sentence that describes the limit.

        `unit` is the word for permits, such as "requests".
        """

    @property
    def may_prefetch(self) -> bool:
        """Return whether permits of this limit can be prefetched."""
        where = self.prefetch_where
        return where is not None and all(getattr(self, name) in values for name, values in where.items())

    @property
    def undoable(self) -> bool:
        """Return whether giving permits back fully restores the earlier state."""
        return True

    @property
    def max_cost(self) -> int | None:
        """Return the maximum cost of one request; None if there is only the general maximum (see quota/costs.py)."""
        return None

    @property
    def suggested_max_wait(self) -> Decimal | None:
        """Return a max_wait in seconds that fits the limit's numbers; None if there is none."""
        return None

    @abstractmethod
    def params(self, now: int) -> Params:
        """Return the numbers for the script, at most eight, valid at `now` (µs since 1970 UTC)."""

    def valid_span(self, now: int) -> tuple[int, int] | None:
        """Return start and end (µs since 1970 UTC) of the time for which `params(now)` is valid; None: always."""
        return None

    def fast_path(self, params: Params) -> FastPath | None:
        """Return the limit's form for lua/fast.lua; None if lua/fast.lua cannot decide a limit with these `params`."""
        return None

    def month_at(self, moment: int) -> tuple[int, int] | None:
        """Return start and end (µs) of the month around a moment; None if the limit is not for calendar months."""
        return None


@dataclass(frozen=True, slots=True)
class Bounded(Algorithm):
    """A limit with a capacity, the maximum number of permits. With capacity 0 no request passes."""

    capacity: int

    def _check(self) -> None:
        self._set("capacity", whole("capacity", self.capacity))

    @property
    def shown(self) -> int:
        return self.capacity

    @property
    def closed(self) -> bool:
        return self.capacity == 0

    @property
    def quota(self) -> tuple[int, int | None]:
        return self.capacity, None
