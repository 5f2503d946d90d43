"""What the floors above add to the pages of this one.

Each floor makes one `Additions` for each place from which Django starts it: its `ready`, and its pages in the admin.
Without them, a page shows only what this floor knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from django.db.models import Model


@dataclass(frozen=True, slots=True)
class UsedKeys:
    """A table that has the keys and accounts with usage in the last days.

    table        this table
    shown_with   the table whose rows a user must be allowed to view, to find these keys
    keys         returns the keys that contain a text, and the accounts that contain it, as keys
    accounts     returns the accounts that contain a text
    keys_of      returns keys that an account has used, at most this number
    accounts_of  returns accounts that have used a key, at most this number; "" stands for no account
    """

    table: type[Model]
    shown_with: type[Model]
    keys: Callable[[str], Iterable[str]]
    accounts: Callable[[str], Iterable[str]]
    keys_of: Callable[[str, int], Iterable[str]]
    accounts_of: Callable[[str, int], Iterable[str]]


def _nothing(*_arguments: Any) -> tuple[Any, ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Additions:
    """What one floor adds. A function that the floor does not give adds nothing."""

    used_keys: tuple[UsedKeys, ...] = ()


#: What the floors above have added, the lower floor first.
registered: list[Additions] = []


def register(added: Additions) -> None:
    """Let the pages have what a floor adds. Call this when Django starts."""
    if added not in registered:
        registered.append(added)


def used_keys() -> list[UsedKeys]:
    """Return the tables that have used keys."""
    return [one for added in registered for one in added.used_keys]
