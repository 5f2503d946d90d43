from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message

import pytest

from ratelimits.usage.posting import MAX_BODY, Connection, HttpAnswer, NotPublicError, is_public


@contextmanager
def peer(work: Callable[[socket.socket, threading.Event], None]) -> Iterator[str]:
    """Yield the address of a server that runs this with one connection; the event says that the client has gone."""
    gone = threading.Event()

    def serve(server: socket.socket) -> None:
        connection, _address = server.accept()
        with connection, contextlib.suppress(OSError):
            work(connection, gone)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=[server])
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}/path?a=b"
        finally:
            gone.set()
            thread.join()


def test_an_answer_comes_with_its_body_and_headers() -> None:
    heard: list[bytes] = []

    def answer(connection: socket.socket, _gone: threading.Event) -> None:
        heard.append(connection.recv(65_536))
        connection.sendall(b"HTTP/1.1 422 Unprocessable\r\nRetry-After: 7\r\nContent-Length: 2\r\n\r\n{}")

    with peer(answer) as url, Connection(url, 30) as connection:
        found = connection.post(b"", {"X-A": "b"})
    assert (found.status, found.body, found.retry_after()) == (422, b"{}", 7)
    assert heard[0].startswith(b"POST /path?a=b HTTP/1.1\r\n")


def test_a_body_that_comes_byte_by_byte_has_the_deadline_of_the_whole() -> None:
    def drip(connection: socket.socket, gone: threading.Event) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 600\r\n\r\n")
        while not gone.wait(0.05):
            connection.sendall(b"x")

    with peer(drip) as url, Connection(url, 0.5) as connection, pytest.raises(TimeoutError):
        connection.post(b"{}", {})


def test_a_peer_that_reads_nothing_has_the_same_deadline() -> None:
    def ignore(_connection: socket.socket, gone: threading.Event) -> None:
        gone.wait()

    with peer(ignore) as url, Connection(url, 0.5) as connection, pytest.raises(TimeoutError):
        connection.post(b"x" * 50_000_000, {})


def test_no_more_of_a_body_is_read_than_anybody_needs() -> None:
    def flood(connection: socket.socket, _gone: threading.Event) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 50000000\r\n\r\n")
        connection.sendall(b"x" * 50_000_000)

    with peer(flood) as url, Connection(url, 30) as connection:
        assert len(connection.post(b"", {}).body) == MAX_BODY


def test_who_is_away_has_heard_nothing() -> None:
    with pytest.raises(ConnectionRefusedError):
        Connection("http://127.0.0.1:1/", 30)
    for url in ("example.com", "ftp://example.com/", "http://"):
        with pytest.raises(ValueError, match="is not a URL"):
            Connection(url, 30)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0),
        (" 120 ", 120),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0),
        ("-1", None),
        ("1.5", None),
        ("soon", None),
        ("", None),
        (None, None),
    ],
)
def test_retry_after_is_seconds_or_a_date(value: str | None, seconds: float | None) -> None:
    headers = Message()
    if value is not None:
        headers["Retry-After"] = value
    assert HttpAnswer(429, headers).retry_after() == seconds


def test_nothing_of_what_is_not_http_is_read_back() -> None:
    def greet(connection: socket.socket, _gone: threading.Event) -> None:
        connection.recv(65_536)
        connection.sendall(b"220 mail.internal ESMTP version 4.2\r\n")

    with peer(greet) as url, Connection(url, 30) as connection, pytest.raises(http.client.HTTPException) as raised:
        connection.post(b"", {})
    assert "mail.internal" not in repr(raised.value)
    assert raised.value.__cause__ is None


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:127.0.0.1", False),
        ("2002:7f00:1::", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::192.168.1.1", False),
        ("64:ff9b:1::5db8:d822", False),
        ("64:ff9b:1:5d:b8:d8:2200::", False),
        ("fec0::1", False),
        ("::ffff:0:7f00:1", False),
        ("::ffff:0:10.0.0.1", False),
        ("::ffff:0:5db8:d822", True),
        ("2002:5db8:d822::1", True),
        ("2001:0:4136:e378:8000:63bf:80ff:fffe", False),
        ("2001:0:4136:e378:8000:63bf:a247:27dd", True),
        ("::7f00:1", False),
        ("::5db8:d822", False),
        ("5f00::1", False),
        ("ff0e::1", False),
        ("64:ff9b::5db8:d822", True),
    ],
)
def test_an_address_of_a_private_network_is_not_public(address: str, public: bool) -> None:
    assert is_public(address) is public


def test_the_address_that_is_checked_is_the_one_to_which_it_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the lookups of a name: an answer to a second lookup could be another address than the checked one."""
    lookups: list[str] = []

    def look_up(host: str, port: int, **_more: object) -> list[tuple[object, ...]]:
        lookups.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(NotPublicError, match="no public address"):
        Connection("http://inside.example/", 5, public_only=True)
    assert lookups == ["inside.example"]
