"""Send real HTTP requests from several clients at once, and count the responses."""

from __future__ import annotations

import http.client
import json
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

VOCABULARY = ("quota", "token", "bucket", "ledger", "window", "burst", "lease", "meter", "batch", "report")


@dataclass
class ClientCounts:
    """The responses that the clients got for one key."""

    sent: int = 0
    admitted: int = 0  # responses with status 200
    denied: int = 0  # responses with status 429
    tokens: int = 0  # words in requests that got the status 200
    other: int = 0  # all other responses
    unanswered: int = 0  # requests without a response, because the connection ended


@dataclass(frozen=True)
class Client:
    """A client and its API key: the name under which limits count the key (`key`), and its secret."""

    key: str
    secret: str


@dataclass
class Traffic:
    """Requests to the API of the demo, divided evenly among the clients.

    requests  number of requests
    threads   number of threads that send requests at the same time
    seed      two runs with the same seed send the same requests
    """

    port: int
    clients: list[Client]
    requests: int
    threads: int = 8
    seed: int = 2026
    counts: dict[str, ClientCounts] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = {client.key: ClientCounts() for client in self.clients}
        self._lock = threading.Lock()

    def run(self, on_answer: Callable[[], None]) -> dict[str, ClientCounts]:
        """Send all requests, and return the counts by key. Call `on_answer` after each request.

        If a thread raises an error, stop all threads and raise this error.
        """
        failures: list[BaseException] = []
        stop = threading.Event()

        def work(number: int) -> None:
            try:
                self._send_share(number, on_answer, stop)
            except BaseException as error:  # noqa: BLE001  (handed to the caller's thread)
                failures.append(error)
                stop.set()

        workers = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(self.threads)]
        for worker in workers:
            worker.start()
        try:
            for worker in workers:
                worker.join()
        finally:
            stop.set()
        if failures:
            raise failures[0]
        return self.counts

    def _send_share(self, number: int, on_answer: Callable[[], None], stop: threading.Event) -> None:
        """Send the requests of one thread. For example, each of 8 threads sends every eighth request."""
        chance = random.Random(self.seed * 1000 + number)  # noqa: S311  (traffic, no secrets)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        for request in range(number, self.requests, self.threads):
            if stop.is_set():
                break
            # Each thread goes through the clients in order. The threads begin with different clients.
            sent_by_thread = request // self.threads
            client = self.clients[(number + sent_by_thread) % len(self.clients)]
            words = chance.choices(VOCABULARY, k=chance.randint(5, 60)) if chance.random() < 0.3 else []
            status = _send(connection, client.secret, words)
            with self._lock:
                _count(self.counts[client.key], status, len(words))
                on_answer()
        connection.close()


def _send(connection: http.client.HTTPConnection, secret: str, words: list[str]) -> int | None:
    """Send one request and return the status of the response. If no response comes, return None."""
    headers = {"Authorization": f"Api-Key {secret}", "Accept": "application/json"}
    try:
        if words:
            body = json.dumps({"text": " ".join(words)})
            connection.request("POST", "/api/text/", body, {**headers, "Content-Type": "application/json"})
        else:
            connection.request("GET", "/api/time/?zone=Europe/Paris", headers=headers)
        answer = connection.getresponse()
        answer.read()
    except (OSError, http.client.HTTPException):
        connection.close()
        return None
    return answer.status


def _count(counts: ClientCounts, status: int | None, tokens: int) -> None:
    counts.sent += 1
    match status:
        case 200:
            counts.admitted += 1
            counts.tokens += tokens
        case 429:
            counts.denied += 1
        case None:
            counts.unanswered += 1
        case _:
            counts.other += 1
