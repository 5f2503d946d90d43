"""A report as an HTTP response."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from asgiref.sync import sync_to_async
from django.http import StreamingHttpResponse
from django.utils.http import content_disposition_header

from ratelimits.reports.exports import Format


class Download(StreamingHttpResponse):
    """A response that writes a file of rows while it is sent.

    `rows` and `version` are the arguments of the format's `stream`. The asynchronous iterator is for ASGI: without it,
    Django would read all rows before it sends the first.
    """

    def __init__(self, form: Format, rows: Iterable[Any], version: int, stem: str) -> None:
        name = content_disposition_header(True, f"{stem}{form.suffix}")
        super().__init__(
            form.stream(rows, version),
            content_type=form.content_type,
            headers={"Content-Disposition": name or "attachment"},
        )

    async def __aiter__(self) -> AsyncIterator[bytes]:
        chunks: Iterator[bytes] = iter(self)

        def following() -> bytes | None:
            return next(chunks, None)

        while (chunk := await sync_to_async(following)()) is not None:
            yield chunk
