"""How large a process of benchmarks.growth is made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Size:
    """What a process is given: rules and overrides in the database, live keys of other users, limits of a request.

    `spread`: the requests are by as many different users, in no order; else by one.
    """

    name: str
    title: str
    rules: int = 3
    overrides: int = 0
    keys: int = 1
    limits: int = 3
    spread: int = 1
