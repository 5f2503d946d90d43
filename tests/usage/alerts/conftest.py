from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ratelimits.signals import threshold_reached
from ratelimits.usage.models import Alert


@pytest.fixture(autouse=True)
def _at_once(fsync_at_once: None) -> None:
    """Have the server fsync at once, so that no test waits for the fence."""


@dataclass
class Received:
    """A POST as it arrived."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Receiver:
    """A real HTTP server that records what it receives. It answers with `answers` first, then with 204."""

    server: ThreadingHTTPServer
    url: str
    received: list[Received] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            kept.received.append(Received(self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            self.send_response(kept.answers.pop(0) if kept.answers else 204)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        kept = Receiver(server, f"http://127.0.0.1:{server.server_port}/alerts?from=test")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield kept
        server.shutdown()
        thread.join()


@pytest.fixture
def signalled() -> Iterator[list[Alert]]:
    """Return the alerts that the signal was sent with."""
    alerts: list[Alert] = []

    def receive(*, alert: Alert, **kwargs: object) -> None:
        alerts.append(alert)

    threshold_reached.connect(receive)
    yield alerts
    threshold_reached.disconnect(receive)
