"""Send files of report rows as HTTP responses."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any
from urllib.parse import quote

from ratelimits.billing.models import Report
from ratelimits.billing.reports.exports import Format
from ratelimits.engine.keys import ANONYMOUS
from ratelimits.files import FileDownload

#: Maximum number of characters of an account's name in the name of a file. No common file system stores more than 255
#: bytes, and the quoted name of an account can be longer.
_MAX_ACCOUNT = 120


def file_stem(report: Report) -> str:
    """Return the name of the file of a report, without its suffix.

    The account and the name of the period are in it. If the account has a long name, a digest stands for the rest of
    its name.
    """
    quoted = quote(report.account, safe="") or ANONYMOUS
    period = report.period_name().replace(" (from ", "-from-").rstrip(")")
    if len(quoted) > _MAX_ACCOUNT:
        quoted = f"{quoted[:_MAX_ACCOUNT]}~{blake2b(quoted.encode(), digest_size=8).hexdigest()}"
    return f"{quoted}.{period}.v{report.version}"


class ReportDownload(FileDownload):
    """A response with a file of report rows. `rows` and `version` are the arguments of the format's `stream`."""

    def __init__(self, file_format: Format, rows: Iterable[Any], version: int, stem: str) -> None:
        super().__init__(file_format.stream(rows, version), file_format.content_type, f"{stem}{file_format.suffix}")
