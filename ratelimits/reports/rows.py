"""The row of a report: the one table of its columns, and what makes rows of lines."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import cache, lru_cache
from operator import attrgetter, itemgetter
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple, cast, get_type_hints
from urllib.parse import quote

from ratelimits.engine.keys import ANONYMOUS
from ratelimits.pricing.prices import PricedPart
from ratelimits.reports.columns import NUMBERS, Column, ColumnKind, count, decimal, moment, quantity, text, version
from ratelimits.reports.periods import iso

PROVISIONAL, FINAL = "provisional", "final"
USAGE, ADJUSTMENT = "usage", "adjustment"
#: Categories of charges that are no line of the first schema.
FEE, REPRICING, MINIMUM, ROUNDING = "fee", "repricing", "minimum", "rounding"
CORRECTION = "correction"


def _report_id(report: Any, _status: str) -> str:
    return report_id(report.account, report.period_start)


def _status(_report: Any, status: str) -> str:
    return status


def _of(name: str) -> Callable[[Any, str], Any]:
    return lambda report, _status: getattr(report, name)


# A tuple: reports have millions of rows, and a frozen dataclass of 29 fields takes twenty times as long to make.
class Row(NamedTuple):
    """One line of a report: the table of its columns, in their order.

    Moments are µs since 1970 UTC, intervals half-open, quantities whole units of the meter. consumed_quantity is what
    was admitted; less refunded_quantity it is included_quantity + overage_quantity.
    """

    report_id: Annotated[
        str,
        text(
            "The account and the start of its billing period; the same in every version and every database.",
            of_report=_report_id,
            width=34,
        ),
    ]
    report_version: Annotated[
        int,
        version(
            "1 for the report as it was finalised first, higher for what corrects it; 0 while it is provisional. "
            "Later versions contain the lines of earlier ones, each with the version that brought it in.",
            of_report=_of("version"),
        ),
    ]
    status: Annotated[
        str,
        text(
            "final: this line never changes. provisional: what is known so far.",
            of_report=_status,
            schema={"enum": ["final", "provisional"]},
        ),
    ]
    line_id: Annotated[
        str,
        text(
            "Names the line in every export and every database: the idempotency key of a billing system.",
            width=35,
            schema={"$ref": "#/$defs/line_id"},
        ),
    ]
    account: Annotated[
        str, text("Who pays; empty for usage that no account is known for.", of_report=_of("account"), width=24)
    ]
    key: Annotated[
        str,
        text(
            "Who was counted, with its kind, such as api_key:9f3c or user:42; empty for the account as a whole.",
            width=24,
            listed=True,
        ),
    ]
    meter: Annotated[str, text("What was counted.", listed=True)]
    unit: Annotated[str, text("The unit of the quantities.")]
    charge_category: Annotated[
        str,
        text(
            "usage: what was counted. adjustment: what a person added or took off.",
            listed=True,
            schema={"enum": [USAGE, ADJUSTMENT]},
            priced_schema={
                "enum": [USAGE, ADJUSTMENT, FEE, REPRICING, MINIMUM, ROUNDING],
                "description": "usage: what was counted. adjustment: what a person added or took off. fee: flat fees, "
                "of the price and of its tiers. repricing: what a volume tier changes for units of earlier versions. "
                "minimum: what is lacking of it. rounding: of the period's price to the currency's minor unit.",
            },
        ),
    ]
    charge_class: Annotated[
        str,
        text(
            "correction: changes a period that was already finalised; empty otherwise.",
            listed=True,
            schema={"enum": ["", CORRECTION]},
        ),
    ]
    corrects_line_id: Annotated[
        str,
        text(
            "The line that a correction is about, where there is one.",
            width=35,
            schema={"type": "string", "pattern": "^([0-9a-f]{32})?$"},
        ),
    ]
    billing_period_start: Annotated[
        int, moment("Start of the billing period, which it includes.", of_report=_of("period_start"))
    ]
    billing_period_end: Annotated[
        int, moment("End of the billing period, which it excludes.", of_report=_of("period_end"))
    ]
    charge_period_start: Annotated[int, moment("The usage was counted from then on.")]
    charge_period_end: Annotated[int, moment("The usage was counted before then.")]
    timezone: Annotated[
        str,
        text("IANA name of the time zone whose months the billing periods are.", of_report=_of("timezone"), width=18),
    ]
    consumed_quantity: Annotated[
        int,
        quantity("Units that were admitted; in an adjustment, the units added or (below zero) taken off.", listed=True),
    ]
    included_quantity: Annotated[
        int, quantity("Of consumed_quantity less refunded_quantity, what the plan includes.", listed=True)
    ]
    overage_quantity: Annotated[
        int, quantity("Of consumed_quantity less refunded_quantity, what goes beyond it.", listed=True)
    ]
    refunded_quantity: Annotated[int, quantity("Units that were given back.", listed=True)]
    admitted_count: Annotated[int, count("Requests that were admitted.")]
    denied_count: Annotated[int, count("Requests that were refused.", listed=True)]
    unknown_count: Annotated[
        int, count("Requests whose replies were lost: nobody knows whether they were counted.", listed=True)
    ]
    limit: Annotated[
        str,
        decimal(
            "Capacity (or rate) that the rule had for the key in that version, its override's if there was one; "
            "empty if there is none, if it is not known, or if it changed within the line.",
            schema={"type": "string", "pattern": "^([0-9]+(\\.[0-9]{1,6})?)?$"},
        ),
    ]
    rule: Annotated[
        str, text("The rule that bills, or the one that refused; empty if there is none.", width=20, listed=True)
    ]
    rule_version: Annotated[int, version("Version of the configuration in which the rule was in force.")]
    plan: Annotated[str, text("The account's plan at the end of the billing period.", width=20)]
    batch_range: Annotated[
        str,
        text(
            "The batches of the ledger that the line was made from, such as 07:12-45 (shard and positions).", width=20
        ),
    ]
    durability_gap: Annotated[
        str,
        text(
            "What may be missing: declared gaps that touch the billing period, and where processes were granted more "
            "than the ledger has; empty if there is nothing.",
            of_report=_of("gaps"),
            width=60,
        ),
    ]

    @property
    def columns_version(self) -> int:
        """The version of the columns that this row has; columns of later versions are empty in it."""
        return VERSION

    def texts(self) -> list[str]:
        """Return the values of its columns as every export writes them: moments in ISO 8601, numbers as decimals."""
        return [write(value) for write, value in zip(_WRITE, self, strict=True)]


class Charge(NamedTuple):
    """A row and its amount.

    Without a price, `amount` is None, and `currency` and `total` are "". Each of `parts` is units of the row that have
    the same price. `total` is the amount that the account owes by the report, up to the row's version.
    """

    row: Row
    account_name: str = ""
    currency: str = ""
    parts: tuple[PricedPart, ...] = ()
    amount: Decimal | None = None
    total: str = ""


def _table() -> Iterator[Column]:
    for name, hint in get_type_hints(Row, include_extras=True).items():
        (column,) = hint.__metadata__
        yield replace(column, name=name)


#: Every column, in order; those of a version come before those that were added later.
TABLE = tuple(_table())
#: The newest version of the columns, with which reports are finalised.
VERSION = max(column.since for column in TABLE)
COLUMNS = Row._fields
#: Columns whose values are moments.
MOMENTS = frozenset(column.name for column in TABLE if column.kind is ColumnKind.MOMENT)
#: Columns whose values are numbers.
QUANTITIES = frozenset(column.name for column in TABLE if column.kind in NUMBERS)


@cache
def columns(version: int) -> tuple[Column, ...]:
    """Return the columns of a version."""
    return tuple(column for column in TABLE if column.since <= version)


@cache
def names(version: int) -> tuple[str, ...]:
    """Return the names of a version's columns."""
    return tuple(column.name for column in columns(version))


_WRITE: tuple[Callable[[Any], str], ...] = tuple(iso if name in MOMENTS else str for name in COLUMNS)


@cache
def row_type(version: int) -> type[Row]:
    """Return the type of the rows that have the columns of a version."""
    if version == VERSION:
        return Row
    own = _WRITE[: len(columns(version))]

    def texts(row: Row) -> list[str]:
        return [write(value) for write, value in zip(own, row, strict=False)]

    return cast("type[Row]", type("Row", (Row,), {"__slots__": (), "columns_version": version, "texts": texts}))


class RowMaker:
    """A maker of the rows of one version of a report, with the columns that it was finalised with."""

    def __init__(self, report: Any, status: str) -> None:
        own = columns(report.columns_version)
        #: The fields of lines that a row is made of.
        self.fields = tuple(column.name for column in own if column.stored)
        self._values = attrgetter(*self.fields)
        self._report = {column.name: column.of_report(report, status) for column in own if column.of_report}
        self._computed = [(column.name, column.of_line) for column in own if column.of_line]
        self._rest = (*self._report.values(), *(column.empty for column in TABLE[len(own) :]))
        known = [*self.fields, *self._report, *names(VERSION)[len(own) :], *(name for name, _of in self._computed)]
        self._ordered = itemgetter(*map(known.index, COLUMNS))
        self._make = row_type(report.columns_version)._make

    def of_line(self, line: Any) -> Row:
        """Return the row of a ReportLine."""
        return self.of_values(self._values(line))

    def of_values(self, values: Sequence[Any]) -> Row:
        """Return the row of a line whose `fields` have these values."""
        known = (*values, *self._rest)
        if self._computed:
            line = SimpleNamespace(**dict(zip(self.fields, values, strict=True)))
            known += tuple(of(line) for _name, of in self._computed)
        return self._make(self._ordered(known))

    def of_nothing(self, **known: Any) -> Row:
        """Return a row without a line: zeros and empty texts, except for the values in `known`."""
        blank = self.of_values([column.empty for column in TABLE if column.name in self.fields])
        return blank._replace(**known)


@lru_cache(maxsize=4096)
def report_id(account: str, start: int) -> str:
    """Return the name of an account's report of the period that starts at `start` (µs); equal in every database."""
    compact = iso(start).replace("-", "").replace(":", "")
    return f"{quote(account, safe='') or ANONYMOUS}.{compact}"


def line_id(report: str, *about: str | int) -> str:
    """Return a line's name, made of its subject; equal in every database, so a second delivery is recognised."""
    parts = [report, *map(str, about)]
    if not any("\n" in part for part in parts):
        return joined_line_id(report, *about)
    # With their lengths, so that no other parts make the same text; no report's name is empty.
    return _name("\n" + "".join(f"{len(part)}:{part}" for part in parts))


def joined_line_id(report: str, *about: str | int) -> str:
    """Return a line's name as earlier versions made it: two lines whose parts have line feeds may have the same."""
    return _name("\n".join([report, *map(str, about)]))


def _name(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
