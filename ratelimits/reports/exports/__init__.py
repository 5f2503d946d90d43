"""Report rows to files: streamed, so that a report of any size is written in bounded memory.

A format's `stream` takes rows, or in the second schema charges (an iterable that is read once, only a little ahead of
what was written), and gives the file in chunks of bytes, for a file on disk, standard output or an HTTP response alike.
The same rows give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from ratelimits.reports.exports import amounts, billing, cloudevents, csv, focus, json, xlsx
from ratelimits.reports.rows import VERSION, Row

__all__ = ["DOWNLOADS", "FORMATS", "Format", "installed", "named"]


@dataclass(frozen=True, slots=True)
class Format:
    """One way to write a report."""

    name: str
    label: str
    #: What its files end in: no two formats write files of one name.
    suffix: str
    content_type: str
    #: Takes rows, or charges where it is priced; and the version of the columns that the file is to have.
    written_by: Callable[[Iterable[Any], int], Iterator[bytes]]
    #: The module that it needs beside the app's own requirements, and the extra that brings it.
    module: str = ""
    extra: str = ""
    #: Pass rows through, or raise ValueError at the first that its receiver refuses at a moment (µs since 1970 UTC).
    accepted: Callable[[Iterable[Row], int], Iterator[Row]] | None = None
    #: Whether people may download it; events for a billing system are written by the command alone.
    downloaded: bool = True
    #: Whether it is of the second schema: written of charges, rows with what they cost.
    priced: bool = False

    def stream(self, found: Iterable[Any], version: int = VERSION) -> Iterator[bytes]:
        """Return the file in chunks; `version` is that of the columns that it is to have."""
        return self.written_by(found, version)

    @property
    def missing(self) -> str:
        """What must be installed first, as a sentence; "" if it can be written."""
        if not self.module or find_spec(self.module):
            return ""
        return f"{self.label} needs {self.module}: pip install 'ratelimits[{self.extra}]'"


#: Formats by name.
FORMATS = {
    each.name: each
    for each in (
        Format("csv", "CSV", ".csv", "text/csv; charset=utf-8", csv.stream),
        Format(
            "csv-spreadsheet",
            "CSV for spreadsheets",
            ".spreadsheet.csv",
            "text/csv; charset=utf-8",
            csv.stream_for_spreadsheets,
        ),
        Format(
            "xlsx",
            "XLSX",
            ".xlsx",
            "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
            xlsx.stream,
            module="xlsxwriter",
            extra="xlsx",
        ),
        Format("json", "JSON", ".json", "application/json", json.stream),
        Format(
            "cloudevents",
            "CloudEvents",
            ".cloudevents.json",
            "application/cloudevents-batch+json",
            cloudevents.stream,
        ),
        Format(
            "cloudevents-ndjson", "CloudEvents, one a line", ".ndjson", "application/x-ndjson", cloudevents.stream_lines
        ),
        Format(
            "csv-amounts",
            "CSV with amounts",
            ".amounts.csv",
            "text/csv; charset=utf-8",
            amounts.csv_stream,
            priced=True,
        ),
        Format(
            "json-amounts", "JSON with amounts", ".amounts.json", "application/json", amounts.json_stream, priced=True
        ),
        Format(
            "xlsx-amounts",
            "XLSX with amounts",
            ".amounts.xlsx",
            "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
            xlsx.stream_with_amounts,
            module="xlsxwriter",
            extra="xlsx",
            priced=True,
        ),
        Format("focus", "FOCUS", ".focus.csv", "text/csv; charset=utf-8", focus.stream, priced=True),
        Format(
            "stripe",
            "Stripe meter events",
            ".stripe.ndjson",
            "application/x-ndjson",
            billing.stripe,
            accepted=billing.accepted_by_stripe,
            downloaded=False,
        ),
        Format(
            "lago", "Lago batches of events", ".lago.ndjson", "application/x-ndjson", billing.lago, downloaded=False
        ),
    )
}
#: Those that people may download.
DOWNLOADS = {name: each for name, each in FORMATS.items() if each.downloaded}


def installed() -> list[Format]:
    """The formats that can be downloaded here."""
    return [each for each in DOWNLOADS.values() if not each.missing]


def named(file: str) -> Format | None:
    """Return the format that a file's name ends in, by the longest suffix that fits; None if none does."""
    name = file.lower()
    fitting = [each for each in FORMATS.values() if name.endswith(each.suffix)]
    return max(fitting, key=lambda each: len(each.suffix), default=None)
