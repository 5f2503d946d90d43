"""Fakes of Stripe, Lago and OpenMeter, as far as these are documented: HTTP servers that validate and deduplicate.

None of them is the real service. Each checks requests against the published schema. An event that it knows is
answered as its documentation says.
"""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qsl

from jsonschema import Draft202012Validator, FormatChecker

from tests.billing.reports.exports.published import LAGO, OPENMETER, STRIPE

#: What a fake can do with a request instead of answering normally.
Trouble = tuple[int, dict[str, str]] | str
KEY = "sk_test_1"
HOUR, DAY = 3600, 86_400


class Fake(ABC):
    """A server whose `taken` is what it would bill; `now` is its clock, in seconds since 1970 UTC."""

    path: str
    content_type: str
    schema: Draft202012Validator
    #: How long it remembers an event, in seconds; None: for ever.
    remembers: float | None = None

    def __init__(self) -> None:
        self.taken: list[dict[str, Any]] = []
        self.requests: list[list[str]] = []
        #: The events sent under each identity, taken or not.
        self.arrived: dict[str, set[str]] = {}
        self.invalid: list[str] = []
        self.now: Callable[[], float] = time.time
        #: Used one after the other: a status with headers; "lose": take it and hang up; "fail": take it and answer 500;
        #: "cut": take it and hang up in the middle of the answer; "drop": hang up.
        self.troubles: list[Trouble] = []
        #: Called for each request after `troubles` is used up.
        self.trouble: Callable[[], Trouble | None] = lambda: None
        #: The meters that it does not have.
        self.unknown: set[str] = set()
        self._known: dict[str, float] = {}
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                fake._handle(self, body)

            def log_message(self, *args: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @abstractmethod
    def events(self, body: bytes) -> list[dict[str, Any]]:
        """Return the events of a request; an event that does not fit the published schema fails the test."""

    @abstractmethod
    def name(self, event: dict[str, Any]) -> str:
        """Return the identity of an event."""

    @abstractmethod
    def answer(self, events: list[dict[str, Any]], known: list[bool]) -> tuple[int, Any]:
        """Return status and body; `known` says which events it already has. Append the events it takes to `taken`."""

    def authorized(self, headers: Any) -> bool:
        return bool(headers["Authorization"] == f"Bearer {KEY}")

    def validate(self, document: Any) -> None:
        checker = Draft202012Validator(self.schema.schema, format_checker=FormatChecker())
        self.invalid += [error.message for error in checker.iter_errors(document)]

    def take(self, event: dict[str, Any]) -> None:
        self._known[self.name(event)] = self.now()
        self.taken.append(event)

    def knows(self, event: dict[str, Any]) -> bool:
        at = self._known.get(self.name(event))
        return at is not None and (self.remembers is None or self.now() - at < self.remembers)

    def _handle(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        with self._lock:
            trouble = self.troubles.pop(0) if self.troubles else self.trouble()
            if isinstance(trouble, tuple):
                status, headers = trouble
                self._reply(handler, status, None, headers)
                return
            if trouble == "drop":
                handler.close_connection = True
                return
            status, answer = self._answered(handler, body)
            if trouble == "lose":
                handler.close_connection = True
                return
            if trouble == "fail":
                status, answer = 500, None
        self._reply(handler, status, answer, {}, cut=trouble == "cut")

    def _answered(self, handler: BaseHTTPRequestHandler, body: bytes) -> tuple[int, Any]:
        if handler.path != self.path:
            return 404, None
        if not self.authorized(handler.headers):
            return 401, {"error": {"type": "invalid_request_error", "message": "Invalid API Key"}}
        if handler.headers["Content-Type"] != self.content_type:
            self.invalid.append(f"Content-Type {handler.headers['Content-Type']}")
        events = self.events(body)
        self.requests.append([self.name(event) for event in events])
        for event in events:
            self.arrived.setdefault(self.name(event), set()).add(json.dumps(event, sort_keys=True))
        return self.answer(events, [self.knows(event) for event in events])

    def _reply(
        self, handler: BaseHTTPRequestHandler, status: int, answer: Any, headers: dict[str, str], *, cut: bool = False
    ) -> None:
        content = b"" if answer is None else json.dumps(answer).encode()
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content[: len(content) // 2] if cut else content)
        handler.close_connection = handler.close_connection or cut


class StripeFake(Fake):
    """POST /v1/billing/meter_events."""

    path, content_type = "/v1/billing/meter_events", "application/x-www-form-urlencoded"
    schema = STRIPE
    remembers = DAY

    def events(self, body: bytes) -> list[dict[str, Any]]:
        event: dict[str, Any] = {"payload": {}}
        for name, value in parse_qsl(body.decode(), keep_blank_values=True, strict_parsing=True):
            if name.startswith("payload[") and name.endswith("]"):
                event["payload"][name[8:-1]] = value
            else:
                event[name] = int(value) if name == "timestamp" else value
        self.validate(event)
        return [event]

    def name(self, event: dict[str, Any]) -> str:
        return str(event["identifier"])

    def answer(self, events: list[dict[str, Any]], known: list[bool]) -> tuple[int, Any]:
        (event,) = events
        if event["event_name"] in self.unknown:
            return self._error(f"No active meter found with event name {event['event_name']}.")
        if not self.now() - 35 * DAY <= event["timestamp"] <= self.now() + 300:
            return self._error("The timestamp must be within the past 35 calendar days.")
        if known[0]:
            return self._error(f"An event already exists with identifier {self.name(event)}.")
        self.take(event)
        return 200, {"object": "billing.meter_event", "created": int(self.now()), "livemode": False, **event}

    def _error(self, message: str) -> tuple[int, Any]:
        return 400, {"error": {"type": "invalid_request_error", "message": message}}


class LagoFake(Fake):
    """POST /api/v1/events/batch: all events of a batch are taken or none."""

    path, content_type = "/api/v1/events/batch", "application/json"
    schema = LAGO

    def events(self, body: bytes) -> list[dict[str, Any]]:
        document = json.loads(body)
        self.validate(document)
        events: list[dict[str, Any]] = document["events"]
        return events

    def name(self, event: dict[str, Any]) -> str:
        return str(event["transaction_id"])

    def answer(self, events: list[dict[str, Any]], known: list[bool]) -> tuple[int, Any]:
        wrong: dict[str, Any] = {}
        if len(events) > 100:
            wrong["events"] = ["too_many_events"]
        for place, event in enumerate(events):
            if event["code"] in self.unknown:
                wrong[str(place)] = {"code": ["metric_not_found"]}
            elif known[place]:
                wrong[str(place)] = {"transaction_id": ["value_already_exist"]}
        if wrong:
            details = {"status": 422, "error": "Unprocessable Entity", "code": "validation_errors"}
            return 422, {**details, "error_details": wrong}
        for event in events:
            self.take(event)
        return 200, {"events": [{"lago_id": str(place), **event} for place, event in enumerate(events)]}


class OpenMeterFake(Fake):
    """POST /api/v1/events: known events are dropped silently, and a refusal does not name the wrong event."""

    path, content_type = "/api/v1/events", "application/cloudevents-batch+json"
    schema = OPENMETER
    remembers = DAY

    def events(self, body: bytes) -> list[dict[str, Any]]:
        document = json.loads(body)
        self.validate(document)
        events: list[dict[str, Any]] = document
        return events

    def name(self, event: dict[str, Any]) -> str:
        return f"{event['source']} {event['id']}"

    def answer(self, events: list[dict[str, Any]], known: list[bool]) -> tuple[int, Any]:
        if any(event["data"]["meter"] in self.unknown for event in events):
            return 400, {"type": "about:blank", "title": "Bad Request", "status": 400, "detail": "invalid event"}
        for event, seen in zip(events, known, strict=True):
            if not seen:
                self.take(event)
        return 204, None


FAKES: dict[str, type[Fake]] = {"stripe": StripeFake, "lago": LagoFake, "openmeter": OpenMeterFake}


def options(name: str, fake: Fake, since: str = "2025-01") -> dict[str, Any]:
    """Return the options in RATELIMITS["PUSH"] for a fake."""
    return {"FORMAT": name, "KEY": KEY, "URL": fake.url, "SINCE": since}
