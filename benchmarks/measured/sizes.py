"""The numbers of one size of benchmarks.growth."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Size:
    """The numbers of one size.

    `rules` and `overrides` are rows in the database, `keys` are live keys of other users, `limits` are the limits of a
    request. The requests come from `spread` users in random order; 0: from one user.
    """

    name: str
    title: str
    rules: int = 3
    overrides: int = 0
    keys: int = 1
    limits: int = 3
    spread: int = 1
