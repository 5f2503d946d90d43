"""Send files as HTTP responses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from hashlib import blake2b
from typing import Any
from urllib.parse import quote

from asgiref.sync import sync_to_async
from django.http import StreamingHttpResponse
from django.utils.http import content_disposition_header

from ratelimits.engine.keys import ANONYMOUS
from ratelimits.models import Report
from ratelimits.reports.exports import Format

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


class FileDownload(StreamingHttpResponse):
    """A response whose file is written while the response is sent.

    Under ASGI, Django uses the asynchronous iterator. Without it, Django would read all chunks before it sends the
    first one.
    """

    def __init__(self, chunks: Iterable[bytes], content_type: str, file: str) -> None:
        name = content_disposition_header(True, file)
        headers = {"Content-Disposition": name or "attachment"}
        super().__init__(chunks, content_type=content_type, headers=headers)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        chunks: Iterator[bytes] = iter(self)

        def next_chunk() -> bytes | None:
            return next(chunks, None)

        while (chunk := await sync_to_async(next_chunk)()) is not None:
            yield chunk


class ReportDownload(FileDownload):
    """A response with a file of report rows. `rows` and `version` are the arguments of the format's `stream`."""

    def __init__(self, file_format: Format, rows: Iterable[Any], version: int, stem: str) -> None:
        super().__init__(file_format.stream(rows, version), file_format.content_type, f"{stem}{file_format.suffix}")
