"""The interface between the replay and one limit: pure functions of a state and a time (µs)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from tests.reference.amounts import SECOND

NEVER = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """A limit's answer to a request. `wait` and `retry_after` are µs.

    `retry_after` is 0 if the request passes (after `wait`), and NEVER if it can never pass.
    """

    retry_after: int | None
    wait: int = 0

    @property
    def passes(self) -> bool:
        return self.retry_after == 0


PASS = Verdict(0)
NO_HOPE = Verdict(NEVER)


class Limit:
    """One rule's definition. A state is any immutable value; `now` is never before the state's own moments."""

    algorithm: ClassVar[str]
    shown: float

    def born(self, now: int) -> Any:
        """Return the state of a new key."""
        raise NotImplementedError

    def judge(self, state: Any, now: int, cost: int, patience: int | None) -> Verdict:
        """Judge a request of `cost` ≥ 1 that would wait `patience` µs (None: as long as necessary)."""
        raise NotImplementedError

    def charged(self, state: Any, now: int, cost: int, lease: str) -> Any:
        """Return the state after a request that passed."""
        raise NotImplementedError

    def refunded(self, state: Any, now: int, cost: int, lease: str) -> Any:
        """Return the state after `cost` permits were given back."""
        raise NotImplementedError

    def released(self, state: Any, now: int, lease: str) -> Any:
        """Return the state after a lease was released."""
        return state

    def jumped(self, state: Any, newest: int, to: int) -> Any:
        """Return the state after the clock was corrected from `newest` back to the earlier time `to`."""
        raise NotImplementedError

    def handed_over(self, state: Any, now: int, new: Any) -> Any:
        """Return the state under another rule of the same algorithm, from `now` on."""
        raise NotImplementedError

    def jumped_over(self, state: Any, newest: int, to: int, new: Any) -> Any:
        """Return the state after the clock was corrected and the rule was changed, both at once."""
        return self.handed_over(self.jumped(state, newest, to), to, new)

    def remaining(self, state: Any, now: int) -> int:
        """Return the number of whole permits that could be taken now, at least 0."""
        raise NotImplementedError

    def reset_after(self, state: Any, now: int) -> int:
        """Return the µs until the state is the same as if the key was never used."""
        raise NotImplementedError


JUMP = 60 * SECOND
