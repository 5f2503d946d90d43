"""The tables that can be imported and exported, with their columns. A row is written as a line of cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from ratelimits.formulas import restorable
from ratelimits.models import Account, KeyOverride, Plan, PlanMembership, Rule
from ratelimits.models.versioned import Versioned


@dataclass(frozen=True, slots=True)
class PlansAndRules:
    """The plans by slug, and the rules by name, for lines that name them. Rules of several plans can have one name."""

    plans: dict[str, Plan]
    rules: dict[str, list[Rule]]

    @classmethod
    def read(cls, using: str) -> PlansAndRules:
        """Return all plans and rules. This needs two queries."""
        rules: dict[str, list[Rule]] = {}
        for rule in Rule.objects.using(using).select_related("plan"):
            rules.setdefault(rule.name, []).append(rule)
        return cls({plan.slug: plan for plan in Plan.objects.using(using)}, rules)


@dataclass(frozen=True, slots=True)
class FileTable:
    """A table whose rows can be imported and exported.

    columns   the columns, in the order of the file
    identity  the columns that say which row a line is about
    needed    the columns that a file must have
    check     a function that raises ValidationError if a row is not valid. It makes no query
    """

    model: type[Versioned]
    columns: tuple[str, ...]
    identity: tuple[str, ...]
    needed: tuple[str, ...]
    check: Callable[[Any, PlansAndRules], None]

    @property
    def name(self) -> str:
        """Return the name of the model."""
        return str(self.model._meta.model_name)

    @property
    def dated(self) -> bool:
        """Return whether rows have a start and an end. If so, several rows with the same identity are possible."""
        return "valid_from" in self.columns

    @property
    def numbers(self) -> set[str]:
        """Return the columns with numbers and moments. No spreadsheet reads the cells of these columns as formulas."""
        return {"valid_from", "valid_until", "capacity", "rate", "period"} & {*self.columns}


TABLES = {
    table.model: table
    for table in (
        FileTable(
            PlanMembership,
            ("key", "plan", "valid_from", "valid_until"),
            identity=("key",),
            needed=("key", "plan"),
            check=lambda row, known: row.clean_values(),
        ),
        FileTable(
            KeyOverride,
            ("key", "rule", "capacity", "rate", "period", "mode", "valid_from", "valid_until", "reason"),
            identity=("key", "rule"),
            needed=("key", "rule"),
            check=lambda row, known: row.clean_values(known.rules),
        ),
        FileTable(
            Account,
            ("identifier", "name", "plan", "timezone", "billing_anchor"),
            identity=("identifier",),
            needed=("identifier",),
            check=lambda row, known: row.clean(),
        ),
    )
}


def written(value: Any) -> str:
    """Return the text of a cell for a value: the slug for a plan, and "" for None.

    Moments are written in UTC.
    """
    if value is None:
        return ""
    if isinstance(value, Plan):
        return value.slug
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, Decimal):
        return f"{value:f}".rstrip("0").rstrip(".") if "." in f"{value:f}" else f"{value:f}"
    return str(value)


def lines(table: FileTable, rows: Iterable[Any]) -> Iterator[list[str]]:
    """Yield the cells of each row, changed so that no spreadsheet reads a cell as a formula.

    An import undoes this change, and makes the same rows again.
    """
    for row in rows:
        yield [restorable(written(getattr(row, name))) for name in table.columns]
