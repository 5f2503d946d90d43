"""Clients that stop reading, or hang up. They call Django's own handlers for WSGI and ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from io import BytesIO
from typing import Any
from wsgiref.util import FileWrapper, setup_testing_defaults


class Wsgi:
    """A request to a WSGI application. The test may read `body` and must close the request."""

    def __init__(self, application: Any, path: str, **environ: Any) -> None:
        full: dict[str, Any] = {"PATH_INFO": path, "REMOTE_ADDR": "203.0.113.9", "wsgi.input": BytesIO(), **environ}
        setup_testing_defaults(full)
        self.status = 0
        self.body: Iterable[bytes] = application(full, self._start)

    def _start(self, status: str, headers: list[tuple[str, str]]) -> None:
        self.status = int(status[:3])

    def close(self) -> None:
        """Close the response, as every WSGI server must (PEP 3333)."""
        self.body.close()  # type: ignore[attr-defined]


#: A WSGI server with this wrapper sends files by itself.
FILES = {"wsgi.file_wrapper": FileWrapper}


class Asgi:
    """A request to an ASGI application. Its client can hang up."""

    def __init__(self, application: Any, path: str, method: str = "GET") -> None:
        self.status = 0
        self.body = b""
        self._begun = False
        self._gone = asyncio.Event()
        self._read = asyncio.Event()
        self._most: int | None = None
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "method": method,
            "path": path,
            "query_string": b"",
            "headers": [],
            "client": ("203.0.113.9", 1),
        }
        self.task = asyncio.ensure_future(application(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if not self._begun:
            self._begun = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.status = message.get("status", self.status)
        self.body += message.get("body", b"")
        if self._most is not None and len(self.body) >= self._most:
            self._read.set()
            await asyncio.Event().wait()  # the client has stopped reading, and the server's buffers are full

    async def read(self, size: int) -> None:
        """Read this number of bytes and no more; return when they have arrived."""
        self._most = size
        reading = asyncio.ensure_future(self._read.wait())
        await asyncio.wait([reading, self.task], return_when=asyncio.FIRST_COMPLETED)
        reading.cancel()

    async def hang_up(self) -> None:
        """Hang up, and wait until the application has ended."""
        self._gone.set()
        done, _pending = await asyncio.wait([self.task], timeout=60)
        assert done, "the application goes on although its client has gone"
        await self.task


async def until(condition: Callable[[], Any], seconds: float = 30) -> None:
    """Let the event loop run until the condition holds."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  (another thread may make the condition true)
            await asyncio.sleep(0.001)


def awaited(name: str) -> bool:
    """Return whether a task of this loop waits within the coroutine function of that name."""
    for task in asyncio.all_tasks():
        coroutine: Any = task.get_coro()
        while coroutine is not None:
            if getattr(getattr(coroutine, "cr_code", None), "co_name", "") == name:
                return True
            coroutine = getattr(coroutine, "cr_await", None)
    return False
