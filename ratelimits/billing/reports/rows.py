"""Define the columns of a report, and make rows from stored lines."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import cache, lru_cache
from operator import attrgetter, itemgetter
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple, cast, get_type_hints

from ratelimits.billing.pricing.prices import PricedPart
from ratelimits.billing.reports.columns import (
    NUMBERS,
    Column,
    ColumnKind,
    count,
    decimal,
    moment,
    quantity,
    text,
    version,
)
from ratelimits.usage.periods import iso

#: The values of the column `status`.
PROVISIONAL, FINAL = "provisional", "final"
#: Categories of lines with units.
USAGE, ADJUSTMENT = "usage", "adjustment"
#: Categories of charges that have an amount but no units. Only exports with amounts have rows for them.
FEE, REPRICING, MINIMUM, ROUNDING = "fee", "repricing", "minimum", "rounding"
#: The charge class of lines that change a finalised period.
CORRECTION = "correction"


def _report_id(report: Any, _status: str) -> str:
    return report_id(report.customer_id, report.period_start)


def _status(_report: Any, status: str) -> str:
    return status


def _from_report(name: str) -> Callable[[Any, str], Any]:
    """Return a function that takes a report and a status, and returns the report's field `name`."""
    return lambda report, _status: getattr(report, name)


# Rows are tuples, because reports have millions of rows. To make a frozen dataclass would take twenty times as long.
class Row(NamedTuple):
    """A row of a report. Its fields are the report's columns, in their order.

    Moments are µs since 1970 UTC. A period includes its start and excludes its end. Quantities are whole units of the
    meter, and `consumed_quantity - refunded_quantity = included_quantity + overage_quantity`.
    """

    report_id: Annotated[
        str,
        text(
            "The customer's token and the start of its billing period; the same in every version of the report.",
            from_report=_report_id,
            width=34,
        ),
    ]
    report_version: Annotated[
        int,
        version(
            "0 while the report is provisional, 1 when it is first finalised, higher for each correction. "
            "A later version contains the lines of earlier versions; each line has the version that added it.",
            from_report=_from_report("version"),
        ),
    ]
    status: Annotated[
        str,
        text(
            "final: this line never changes. provisional: this line can still change.",
            from_report=_status,
            schema={"enum": ["final", "provisional"]},
        ),
    ]
    line_id: Annotated[
        str,
        text(
            "The line's name, the same in every export. Billing systems use it as idempotency key.",
            width=35,
            schema={"$ref": "#/$defs/line_id"},
        ),
    ]
    account: Annotated[
        str, text("The account that pays; empty if it is not known.", from_report=_from_report("account"), width=24)
    ]
    key: Annotated[
        str,
        text(
            "The key whose usage was counted, such as api_key:9f3c or user:42; empty for the account as a whole.",
            width=24,
            listed=True,
        ),
    ]
    meter: Annotated[str, text("The name of what was counted, such as requests.", listed=True)]
    unit: Annotated[str, text("The unit of the quantities.")]
    charge_category: Annotated[
        str,
        text(
            "usage: units that were counted. adjustment: units that a person added or subtracted.",
            listed=True,
            schema={"enum": [USAGE, ADJUSTMENT]},
            priced_schema={
                "enum": [USAGE, ADJUSTMENT, FEE, REPRICING, MINIMUM, ROUNDING],
                "description": "usage: units that were counted. adjustment: units that a person added or subtracted. "
                "fee: flat fees of the price and of its tiers. repricing: the total reached another volume tier, so "
                "units of earlier versions now have another price; this is the difference. minimum: the amount by "
                "which the price is below the minimum. rounding: the difference between the period's price and the "
                "same price rounded to the currency's minor unit.",
            },
        ),
    ]
    charge_class: Annotated[
        str,
        text(
            "correction: this line changes a period that was already finalised; empty otherwise.",
            listed=True,
            schema={"enum": ["", CORRECTION]},
        ),
    ]
    corrects_line_id: Annotated[
        str,
        text(
            "The line_id of the line that this line corrects; empty if there is none.",
            width=35,
            schema={"type": "string", "pattern": "^([0-9a-f]{32})?$"},
        ),
    ]
    billing_period_start: Annotated[
        int, moment("Start of the billing period (inclusive).", from_report=_from_report("period_start"))
    ]
    billing_period_end: Annotated[
        int, moment("End of the billing period (exclusive).", from_report=_from_report("period_end"))
    ]
    charge_period_start: Annotated[int, moment("Start of the time in which the usage was counted (inclusive).")]
    charge_period_end: Annotated[int, moment("End of the time in which the usage was counted (exclusive).")]
    timezone: Annotated[
        str,
        text("The time zone of the billing period (its IANA name).", from_report=_from_report("timezone"), width=18),
    ]
    consumed_quantity: Annotated[
        int,
        quantity(
            "Units that were admitted. In an adjustment: units that were added, or subtracted (below zero).",
            listed=True,
        ),
    ]
    included_quantity: Annotated[
        int, quantity("The part of consumed_quantity - refunded_quantity that the plan includes.", listed=True)
    ]
    overage_quantity: Annotated[
        int, quantity("The part of consumed_quantity - refunded_quantity that the plan does not include.", listed=True)
    ]
    refunded_quantity: Annotated[int, quantity("Units that were refunded.", listed=True)]
    admitted_count: Annotated[int, count("Requests that were admitted.")]
    denied_count: Annotated[int, count("Requests that were refused.", listed=True)]
    unknown_count: Annotated[
        int, count("Requests whose replies were lost: nobody knows whether they were counted.", listed=True)
    ]
    limit: Annotated[
        str,
        decimal(
            "The capacity (or the rate) of the rule, or of the key's override, in the version that the column "
            "rule_version gives. Empty if there is no rule, if the number is not known, or if it changed within the "
            "time of the line.",
            schema={"type": "string", "pattern": "^([0-9]+(\\.[0-9]{1,6})?)?$"},
        ),
    ]
    rule: Annotated[
        str, text("The rule that billed or refused the requests; empty if there is none.", width=20, listed=True)
    ]
    rule_version: Annotated[
        int, version("Version of the rule: the number of the last edit that changed the rule for this key.")
    ]
    plan: Annotated[
        str,
        text("The account's plan at the end of the billing period, or else its last plan in this period.", width=20),
    ]
    batch_range: Annotated[
        str,
        text("The ledger's batches from which the line was made, such as 07:12-45 (shard and positions).", width=20),
    ]
    durability_gap: Annotated[
        str,
        text(
            "Where usage may be missing: the declared gaps in the billing period, and the meters for which processes "
            "counted more requests than the ledger has. Otherwise empty.",
            from_report=_from_report("gaps"),
            width=60,
        ),
    ]

    @property
    def columns_version(self) -> int:
        """Return the version of this row's columns. Columns that were added later are empty in this row."""
        return VERSION

    def texts(self) -> list[str]:
        """Return the values as every export writes them: moments in ISO 8601, numbers in decimal digits."""
        return [write(value) for write, value in zip(_WRITE, self, strict=True)]


class Charge(NamedTuple):
    """A row and its amount.

    `parts` has one part for each unit price of the row's units. `total` is the sum of all amounts, in this
    currency, of the row's version and of the report's earlier versions. If the row's meter has no price, `amount` is
    None. If no meter of the row's billing period has a price, `currency` and `total` are "".
    """

    row: Row
    account_name: str = ""
    currency: str = ""
    parts: tuple[PricedPart, ...] = ()
    amount: Decimal | None = None
    total: str = ""


def _table() -> Iterator[Column]:
    """Yield the columns in the annotations of `Row`, each with its name."""
    for name, hint in get_type_hints(Row, include_extras=True).items():
        (column,) = hint.__metadata__
        yield replace(column, name=name)


#: Every column, in order. Columns that were added later come last.
TABLE = tuple(_table())
#: The newest version of the columns. New reports are finalised with this version.
VERSION = max(column.since for column in TABLE)
COLUMNS = Row._fields
#: Columns whose values are moments.
MOMENTS = frozenset(column.name for column in TABLE if column.kind is ColumnKind.MOMENT)
#: Columns whose values are whole numbers.
WHOLE_NUMBERS = frozenset(column.name for column in TABLE if column.kind in NUMBERS)


@cache
def columns(version: int) -> tuple[Column, ...]:
    """Return the columns of a version."""
    return tuple(column for column in TABLE if column.since <= version)


@cache
def names(version: int) -> tuple[str, ...]:
    """Return the names of a version's columns."""
    return tuple(column.name for column in columns(version))


#: For each column, the function that writes its values as texts.
_WRITE: tuple[Callable[[Any], str], ...] = tuple(iso if name in MOMENTS else str for name in COLUMNS)


@cache
def row_type(version: int) -> type[Row]:
    """Return the type of the rows that have the columns of a version."""
    if version == VERSION:
        return Row
    writers = _WRITE[: len(columns(version))]

    def texts(row: Row) -> list[str]:
        return [write(value) for write, value in zip(writers, row, strict=False)]

    return cast("type[Row]", type("Row", (Row,), {"__slots__": (), "columns_version": version, "texts": texts}))


class RowMaker:
    """Makes the rows of a report version. Each row has the columns with which the version was finalised."""

    def __init__(self, report: Any, status: str) -> None:
        used = columns(report.columns_version)
        added_later = TABLE[len(used) :]
        #: The fields of a stored line that its row contains.
        self.fields = tuple(column.name for column in used if column.stored)
        self._values = attrgetter(*self.fields)
        from_report = {column.name: column.from_report(report, status) for column in used if column.from_report}
        self._computed = [(column.name, column.from_line) for column in used if column.from_line]
        self._same_in_each_row = (*from_report.values(), *(column.empty for column in added_later))
        # `of_values` gets the values in this order, and sorts them by column.
        unsorted = [
            *self.fields,
            *from_report,
            *(column.name for column in added_later),
            *(name for name, _compute in self._computed),
        ]
        self._sort = itemgetter(*map(unsorted.index, COLUMNS))
        self._make = row_type(report.columns_version)._make

    def from_line(self, line: Any) -> Row:
        """Return the row of a ReportLine."""
        return self.of_values(self._values(line))

    def of_values(self, values: Sequence[Any]) -> Row:
        """Return the row of a line whose `fields` have these values."""
        unsorted = (*values, *self._same_in_each_row)
        if self._computed:
            line = SimpleNamespace(**dict(zip(self.fields, values, strict=True)))
            unsorted += tuple(compute(line) for _name, compute in self._computed)
        return self._make(self._sort(unsorted))

    def without_line(self, **values: Any) -> Row:
        """Return a row that does not come from a line, with these values.

        All other columns that come from the report have the report's values. The remaining columns contain 0 or an
        empty text.
        """
        empty = self.of_values([column.empty for column in TABLE if column.name in self.fields])
        return empty._replace(**values)


@lru_cache(maxsize=4096)
def report_id(token: str, start: int) -> str:
    """Return the name of a customer's report for the period that starts at `start` (µs since 1970 UTC).

    The name begins with the customer's token, so it says nothing about who the customer is, and never changes.
    """
    compact = iso(start).replace("-", "").replace(":", "")
    return f"{token}.{compact}"


def line_id(report: str, *subject: str | int) -> str:
    """Return the name of a line, made from the name of its report and from its subject.

    The name never changes, so that a receiver recognises a line that it already has.
    """
    parts = [report, *map(str, subject)]
    if not any("\n" in part for part in parts):
        return joined_line_id(report, *subject)
    # A part contains a line feed, so joined parts could give the same name to two lines.
    # Each part is written with its length, so that different parts never make the same text. This text begins with a
    # line feed. The texts of `joined_line_id` never begin with one, because the name of a report is never empty.
    return _hashed("\n" + "".join(f"{len(part)}:{part}" for part in parts))


def joined_line_id(report: str, *subject: str | int) -> str:
    """Return the name of a line as earlier versions of this app made it.

    Two lines can have the same name if their subjects contain line feeds.
    """
    return _hashed("\n".join([report, *map(str, subject)]))


def _hashed(text: str) -> str:
    """Return the first half of the text's SHA-256, which is 32 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]
