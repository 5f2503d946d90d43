"""Build the JSON Schema of exports from the columns of `rows.Row`.

There are two schemas. The schema with amounts also has the columns of `_MONEY`. If a version of the app adds a column,
both schemas get a new version. Both schemas of version 1 are also published as files, in
ratelimits/billing/reports/schema.
"""

from __future__ import annotations

from typing import Any

from ratelimits.billing.reports.columns import Column, ColumnKind
from ratelimits.billing.reports.rows import VERSION, columns

#: The schema of a column's values, by the column's kind.
_OF_KIND = {
    ColumnKind.TEXT: {"$ref": "#/$defs/text"},
    ColumnKind.MOMENT: {"$ref": "#/$defs/moment"},
    ColumnKind.QUANTITY: {"$ref": "#/$defs/quantity"},
    ColumnKind.COUNT: {"$ref": "#/$defs/count"},
    ColumnKind.VERSION: {"$ref": "#/$defs/count"},
    ColumnKind.DECIMAL: {"$ref": "#/$defs/text"},
}
#: The `$defs` of both schemas, without the line.
_DEFINED: dict[str, Any] = {
    "text": {"type": "string"},
    "line_id": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
    "moment": {
        "description": "A moment in UTC. Microseconds are written only if they are not 0.",
        "type": "string",
        "format": "date-time",
        "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\\.[0-9]{6})?Z$",
    },
    "quantity": {
        "description": "A decimal number as a string, because many readers would round a large number.",
        "type": "string",
        "pattern": "^-?(0|[1-9][0-9]*)(\\.[0-9]{1,6})?$",
    },
    "count": {"type": "integer", "minimum": 0},
}
_AMOUNT = {
    "description": "An exact decimal number as a string, because many readers would round it. Empty without a price.",
    "type": "string",
    "pattern": "^(-?(0|[1-9][0-9]*)(\\.[0-9]+)?)?$",
}
#: The columns that only the schema with amounts has. They follow the other columns.
_MONEY = {
    "account_name": {
        "$ref": "#/$defs/text",
        "description": "The account's name when the report was finalised; empty without a name or without a price.",
    },
    "currency": {
        "type": "string",
        "pattern": "^([A-Z]{3})?$",
        "description": "The currency's code in ISO 4217; empty if the account's plan had no prices.",
    },
    "unit_price": {
        "$ref": "#/$defs/amount",
        "description": "The price of one unit of overage_quantity; empty without units, or if their prices differ.",
    },
    "amount": {
        "$ref": "#/$defs/amount",
        "description": "The price of the line, not rounded. The amounts of a report's lines add up to its total.",
    },
    "report_total": {
        "$ref": "#/$defs/amount",
        "description": "The total of the report up to the line's version, in this currency. It is rounded once, half "
        "to even, to the currency's minor unit.",
    },
}


def schema_id(version: int = VERSION, *, priced: bool = False) -> str:
    """Return the `$id` of a schema for a version of the columns. With `priced`, it is the schema with amounts."""
    return f"urn:ratelimits:schema:report:v{2 if priced else 1}{f'.{version}' if version > 1 else ''}"


def schema(version: int = VERSION) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a document. The schema's `$defs.line` describes one line."""
    description = (
        "The file that `ratelimits_report --format json` writes. If a column is added, this schema gets a new version."
    )
    properties = {column.name: _property(column) for column in columns(version)}
    line = "One line; also the data of a CloudEvent."
    return _document(schema_id(version), description, line, properties, _DEFINED, version)


def priced_schema(version: int = VERSION) -> dict[str, Any]:
    """Return the JSON Schema of the document with amounts."""
    description = (
        "The file that `ratelimits_report --format json-amounts` writes: the lines of the first schema with their "
        "amounts, and more lines for amounts that belong to no single line. If a column is added, this schema gets a "
        "new version."
    )
    properties = {column.name: _property(column) | dict(column.priced_schema) for column in columns(version)} | _MONEY
    defined = {**_DEFINED, "amount": _AMOUNT}
    return _document(schema_id(version, priced=True), description, "One line.", properties, defined, version)


def _property(column: Column) -> dict[str, Any]:
    return {**(column.schema or _OF_KIND[column.kind]), "description": column.meaning}


def _document(
    name: str, description: str, line: str, properties: dict[str, Any], defined: dict[str, Any], version: int
) -> dict[str, Any]:
    # A report that was finalised before a column was added does not have this column.
    added = {column.name for column in columns(version) if column.since > 1}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": name,
        "title": "Usage report",
        "description": description,
        "type": "object",
        "required": ["schema", "lines"],
        "additionalProperties": False,
        "properties": {
            "schema": {"const": name},
            "lines": {
                "description": "The lines, sorted by account and start of the billing period.",
                "type": "array",
                "items": {"$ref": "#/$defs/line"},
            },
        },
        "$defs": {
            **defined,
            "line": {
                "title": "Report line",
                "description": line,
                "type": "object",
                "required": [column for column in properties if column not in added],
                "additionalProperties": False,
                "properties": properties,
            },
        },
    }
