"""The base class of all algorithms: frozen parameters, checked when they are made, and their numbers for the script."""

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
    """Where the state of a limit is stored in Redis. engine/keys.py names the keys.

    packed    whether it is an entry in the packed string of its key, as all states of fixed size are
    own       the letter that names its own key; "" if it has none
    endings   the endings that make further keys of the own key, by the names in its Lua file: "${name}"
    """

    packed: bool = True
    own: str = ""
    endings: Mapping[str, str] = {}


class FastPath(NamedTuple):
    """What lua/fast.lua reads of a limit: the size and format of its record in a packed state, and its numbers."""

    size: int
    format: str
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Algorithm(ABC):
    """The numbers of a limit, and everything that differs between algorithms.

    A new algorithm needs a subclass of this, a Lua file and a line in algorithms/limits.py. No other code depends on
    which algorithm a limit has: it uses the attributes below.
    """

    #: Its name in a rule's row and in RULE.json.
    id: ClassVar[str]
    #: Its name for people.
    label: ClassVar[str]
    #: One plain sentence for people who choose an algorithm; "" if there is none.
    explanation: ClassVar[str] = ""
    #: Its number in programs and states, from 1 to 255. Never give the number to another algorithm.
    code: ClassVar[int]
    #: Its file in lua/algorithms, and the files that must be loaded before it.
    script: ClassVar[str]
    builds_on: ClassVar[tuple[str, ...]] = ()
    #: Whether lua/fast.lua knows it, at least with some parameters.
    has_fast_path: ClassVar[bool] = False
    #: Where its state is stored.
    storage: ClassVar[Storage] = Storage()
    #: Whether an admitted request holds a lease, which ends with the request.
    leases: ClassVar[bool] = False
    #: Whether a refusal stays true until its retry_after has passed, so that a process may repeat it from memory.
    refusals_stand: ClassVar[bool] = True
    #: Whether its permits can be prefetched: always ({}), never (None), or if fields have one of these values. Its
    #: permits must all come back at one moment, which a decision names. If permits came back while a process still
    #: holds others, both together would be more than the limit.
    prefetch_where: ClassVar[Mapping[str, tuple[str, ...]] | None] = None
    #: Whether it can admit a request for later, after a wait: then a rule can have a max_wait.
    may_wait: ClassVar[bool] = False
    #: Whether a rule must have a max_wait.
    needs_max_wait: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._check()

    @abstractmethod
    def _check(self) -> None:
        """Raise ValueError for parameters that make no sense."""

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    @abstractmethod
    def shown(self) -> int | float:
        """Return the number that a decision reports as `limit`."""

    @property
    def closed(self) -> bool:
        """Return whether no request ever passes."""
        return False

    @property
    @abstractmethod
    def quota(self) -> tuple[int, int | None]:
        """Return what clients learn: permits, and the time in µs in which all come back (None: no fixed length)."""

    @abstractmethod
    def sentence(self, words: Wording, unit: str) -> list[str]:
        """Return the parts of the sentence that says what passes. `unit` names permits, such as "requests"."""

    @property
    def may_prefetch(self) -> bool:
        """Return whether permits of this limit can be prefetched."""
        where = self.prefetch_where
        return where is not None and all(getattr(self, name) in values for name, values in where.items())

    @property
    def undoable(self) -> bool:
        """Return whether giving permits back restores the state before they were taken."""
        return True

    @property
    def max_cost(self) -> int | None:
        """Return the maximum cost of one request; None if it is the same as for every limit."""
        return None

    @property
    def suggested_max_wait(self) -> Decimal | None:
        """Return the longest wait in seconds that its numbers lead to; None if they lead to none."""
        return None

    @abstractmethod
    def params(self, now: int) -> Params:
        """Return the numbers for the script, at most eight, valid at `now` (µs since 1970 UTC)."""

    def valid_span(self, now: int) -> tuple[int, int] | None:
        """Return since when and until when (µs since 1970 UTC) the `params` of `now` are valid; None: at any time."""
        return None

    def fast_path(self, params: Params) -> FastPath | None:
        """Return what lua/fast.lua reads of a limit with these `params`; None if it does not know such a limit."""
        return None

    def month_at(self, moment: int) -> tuple[int, int] | None:
        """Return start and end of the calendar month around a moment (µs) if it limits months, else None."""
        return None


@dataclass(frozen=True, slots=True)
class Bounded(Algorithm):
    """A limit with a capacity: the maximum number of permits. With 0, no request passes."""

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
