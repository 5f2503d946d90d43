"""What every algorithm is: frozen parameters, checked when they are made, and the numbers that the script is handed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import ClassVar, NamedTuple

from ratelimits.algorithms.parsing import whole
from ratelimits.algorithms.wording import Wording

Params = tuple[int, ...]


class Storage(NamedTuple):
    """Where the state of a limit is kept in Redis; engine/keys.py names the keys.

    packed    whether it is an entry in the packed string of its key: states of fixed size are
    own       the letter that names its own key; "" if it has none
    endings   what further keys have behind the own key, by the names that its Lua file calls them: "${name}"
    """

    packed: bool = True
    own: str = ""
    endings: Mapping[str, str] = {}


class FastPath(NamedTuple):
    """What lua/fast.lua reads of a limit: the bytes of its record in a packed state, their format, and its numbers."""

    size: int
    format: str
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The numbers of a limit, and all that differs from one algorithm to the next.

    A new algorithm is a subclass of this, a Lua file and a line in algorithms/limits.py. Nothing else in the app asks
    which algorithm it has before it: it asks what that one says here.
    """

    #: Its name in a rule's row and in RULE.json.
    id: ClassVar[str]
    #: What people call it.
    label: ClassVar[str]
    #: Its number in programs and in states, from 1 to 255. Never give it to another algorithm.
    code: ClassVar[int]
    #: The file of lua/algorithms that decides it, and those that must be loaded before.
    script: ClassVar[str]
    builds_on: ClassVar[tuple[str, ...]] = ()
    #: Whether lua/fast.lua knows it, with some of its parameters at least.
    has_fast_path: ClassVar[bool] = False
    #: Where its state is kept.
    storage: ClassVar[Storage] = Storage()
    #: Whether a request holds a lease, which ends with it.
    leases: ClassVar[bool] = False
    #: Whether a refusal stands until the moment that it names, so that a process may repeat it from memory.
    refusals_stand: ClassVar[bool] = True
    #: Whether its permits can be taken ahead: always ({}), never (None), or where fields have one of these values. They
    #: must come back all at once, at a moment that a decision tells. Anywhere else permits come back while a process
    #: still holds others, and the two together would be more than the limit.
    prefetch_where: ClassVar[Mapping[str, tuple[str, ...]] | None] = None
    #: Whether it can let a request pass after a wait: such a rule has a max_wait.
    may_wait: ClassVar[bool] = False
    #: Whether it is of no use without: the rule's max_wait must be given.
    needs_max_wait: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._check()

    def _check(self) -> None:
        raise NotImplementedError

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def shown(self) -> int | float:
        """The number that a decision reports as `limit`."""
        raise NotImplementedError

    @property
    def closed(self) -> bool:
        """Whether nothing ever passes."""
        return False

    @property
    def quota(self) -> tuple[int, int | None]:
        """What a client is told: permits, and the µs in which they all come back (None: no fixed length)."""
        raise NotImplementedError

    def sentence(self, words: Wording, unit: str) -> list[str]:
        """Return the parts of the sentence that says what passes: permits are units such as "requests"."""
        raise NotImplementedError

    @property
    def may_prefetch(self) -> bool:
        """Whether permits of this limit can be taken ahead."""
        where = self.prefetch_where
        return where is not None and all(getattr(self, name) in values for name, values in where.items())

    @property
    def undoable(self) -> bool:
        """Whether giving permits back leaves the state as it was before they were taken."""
        return True

    @property
    def max_cost(self) -> int | None:
        """The most permits that one request may take, None if that is no fewer than for every limit."""
        return None

    @property
    def suggested_max_wait(self) -> Decimal | None:
        """The longest wait in seconds that its numbers lead to; None if they lead to none."""
        return None

    def params(self, now: int) -> Params:
        """Return the numbers handed to the script, at most eight, as they are right at `now` (µs since 1970 UTC)."""
        raise NotImplementedError

    def right_at(self, now: int) -> tuple[int, int] | None:
        """Return from when until when (µs since 1970 UTC) `params` of `now` are right; None: at any time."""
        return None

    def fast_path(self, params: Params) -> FastPath | None:
        """Return what lua/fast.lua reads of a limit with these `params`; None if it does not know such a limit."""
        return None

    def month_at(self, moment: int) -> tuple[int, int] | None:
        """Return the calendar month around a moment (µs) that it limits, start and end; None if it limits no months."""
        return None


@dataclass(frozen=True, slots=True)
class Bounded(Algorithm):
    """A limit of so many permits; of none, nothing passes."""

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
