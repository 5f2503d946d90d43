"""What a fact of the status page is: a word, a level (a colour), and a sentence that says what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

#: The names of the facts in the order of the status page. Some are added by the floors above.
ORDER = (
    *("redis", "memory", "eviction", "aof", "failure", "configuration", "crowding", "identities"),
    *("watermark", "open", "sealed", "quarantine", "full", "gaps", "alerts", "push", "seal", "drain", "finalise"),
)


class Level(StrEnum):
    """The colour of a fact. `UNKNOWN` means that the app cannot judge: for example, because Redis does not answer."""

    GREEN = "green"
    AMBER = "amber"
    RED = "red"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact. `name` is its identifier, and `title` is its label. `word` is its value, and `detail` says what to do.

    `model` and `query` are the model and the filters of a list in the admin that shows more. `model` is "" if there is
    no such list.
    """

    name: str
    title: str
    level: Level
    word: str
    detail: str = ""
    model: str = ""
    query: Mapping[str, str] = field(default_factory=dict)


def worst(found: list[Fact]) -> Level:
    """Return the worst level of these facts."""
    order = [Level.RED, Level.AMBER, Level.UNKNOWN]
    return next((level for level in order if any(fact.level is level for fact in found)), Level.GREEN)
