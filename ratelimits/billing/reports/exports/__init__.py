"""Write report rows to files. Files are written as streams, so a report of any size needs little memory.

A format's `stream` takes rows, or charges (rows with amounts). `stream` reads them only once, while it writes the file.
It yields the file in chunks of bytes, which are written to a disk, to standard output or to an HTTP response. The same
rows always give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from ratelimits.billing.reports.exports import amounts, billing, cloudevents, csv, focus, json, xlsx
from ratelimits.billing.reports.rows import VERSION, Row

__all__ = ["DOWNLOADS", "FORMATS", "Format", "format_of_file", "installed"]


@dataclass(frozen=True, slots=True)
class Format:
    """A file format for reports."""

    name: str
    label: str
    #: The end of the names of the format's files. No two formats have the same suffix.
    suffix: str
    content_type: str
    #: Takes rows (charges if `priced` is true) and the version of the file's columns, and yields the file.
    written_by: Callable[[Iterable[Any], int], Iterator[bytes]]
    #: A module that the format needs in addition to the app's requirements.
    module: str = ""
    #: The extra of this app's package that installs the module.
    extra: str = ""
    #: Takes rows and a moment (µs since 1970 UTC), and yields the rows. It raises ValueError at the first row that the
    #: receiving system would refuse at that moment.
    accepted: Callable[[Iterable[Row], int], Iterator[Row]] | None = None
    #: Whether people are allowed to download files of this format. If false, only the command ratelimits_report writes
    #: them.
    downloadable: bool = True
    #: Whether the format has amounts. Then its `stream` takes charges instead of rows.
    priced: bool = False
    #: Whether BILLING_CUSTOMER says who pays for a row. Then rows need the account that their customer has now.
    bills: bool = False

    def stream(self, rows: Iterable[Any], version: int = VERSION) -> Iterator[bytes]:
        """Return the file in chunks; `version` is the version of its columns."""
        return self.written_by(rows, version)

    @property
    def missing(self) -> str:
        """Return a sentence that says what must be installed first; "" if nothing is missing."""
        if not self.module or find_spec(self.module):
            return ""
        return f"{self.label} needs {self.module}: pip install 'django-ratelimits[{self.extra}]'"


#: Formats by name.
FORMATS = {
    file_format.name: file_format
    for file_format in (
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
            "cloudevents-ndjson",
            "CloudEvents, one per line",
            ".ndjson",
            "application/x-ndjson",
            cloudevents.stream_lines,
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
            downloadable=False,
            bills=True,
        ),
        Format(
            "lago",
            "Lago batches of events",
            ".lago.ndjson",
            "application/x-ndjson",
            billing.lago,
            downloadable=False,
            bills=True,
        ),
    )
}
#: The formats that people are allowed to download, by name.
DOWNLOADS = {name: file_format for name, file_format in FORMATS.items() if file_format.downloadable}


def installed() -> list[Format]:
    """Return the formats that can be downloaded with the installed libraries."""
    return [file_format for file_format in DOWNLOADS.values() if not file_format.missing]


def format_of_file(file: str) -> Format | None:
    """Return the format of a file with this name; None if there is none.

    If several suffixes fit, the longest one decides.
    """
    name = file.lower()
    candidates = [file_format for file_format in FORMATS.values() if name.endswith(file_format.suffix)]
    return max(candidates, key=lambda file_format: len(file_format.suffix), default=None)
