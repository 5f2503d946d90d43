"""Write charges as CSV and JSON: the columns of a report row, then the account's name, the currency and amounts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from decimal import Decimal
from itertools import chain

from ratelimits.billing.reports.exports import csv
from ratelimits.billing.reports.exports.json import array, line, text
from ratelimits.billing.reports.exports.schema import priced_schema, schema_id
from ratelimits.billing.reports.rows import COLUMNS as ROW_COLUMNS
from ratelimits.billing.reports.rows import MOMENTS, VERSION, WHOLE_NUMBERS, Charge, names
from ratelimits.files import csv_lines, encoded
from ratelimits.money import written

#: The columns that files with amounts have after the columns of a report row.
MONEY = ("account_name", "currency", "unit_price", "amount", "report_total")
COLUMNS = (*ROW_COLUMNS, *MONEY)
#: Columns that never contain a formula, because their values are not texts.
_COLUMNS_WITHOUT_TEXT = WHOLE_NUMBERS | MOMENTS | {"unit_price", "amount", "report_total"}
#: The end of a line of JSON, with places for the values of the columns `MONEY`.
_END = "".join(f',"{name}":%s' for name in MONEY) + "}"

#: Returns the JSON Schema of the documents that `json_stream` writes.
schema = priced_schema


def money(charge: Charge) -> tuple[str, ...]:
    """Return the values of the columns `MONEY`. The unit price is empty if the units have several prices, or none."""
    prices = {part.unit_price for part in charge.parts}
    return (
        charge.account_name,
        charge.currency,
        decimal(prices.pop() if len(prices) == 1 else None),
        decimal(charge.amount),
        charge.total,
    )


def decimal(amount: Decimal | None) -> str:
    """Return an amount as text without trailing zeros; "" for None."""
    return "" if amount is None else written(amount)


def csv_stream(charges: Iterable[Charge], version: int = VERSION) -> Iterator[bytes]:
    """Yield the charges as a CSV file in chunks. Each charge is read shortly before it is written."""
    rows = ([*values, *money(charge)] for charge in charges for values in csv.cells((charge.row,), version))
    return encoded(csv_lines((*names(version), *MONEY), _COLUMNS_WITHOUT_TEXT, rows))


def json_stream(charges: Iterable[Charge], version: int = VERSION) -> Iterator[bytes]:
    """Yield the charges as a JSON document in chunks. Each charge is read shortly before it is written."""
    # `[:-1]` cuts off the bracket that closes the row. After the amounts, `_END` closes the row.
    items = (line(charge.row)[:-1] + _END % tuple(map(text, money(charge))) for charge in charges)
    name = schema_id(version, priced=True)
    return encoded(chain([f'{{"schema":{text(name)},"lines":'], array(items), ["}\n"]))
