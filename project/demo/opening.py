"""Say where the demo answers, as whom to log in, and what will happen, before any part of the demo runs."""

from __future__ import annotations

import json
import os
import secrets
import socket
from dataclasses import dataclass

from rich.console import Console

from project.demo.processes import listening_socket

#: The name of the staff user.
STAFF = "admin"
#: The environment variable by which the process that starts Valkey hands the opening to the process of the demo.
_VARIABLE = "DEMO_OPENING"


@dataclass(frozen=True)
class Options:
    """The options of the command `demo`."""

    once: bool
    requests: int
    clients: int


@dataclass(frozen=True)
class Opening:
    """The parts of the demo that are printed first: the socket of the web server, and the password of the staff user.

    The socket listens already. So a request that comes before the web server is up waits, and is not refused.
    """

    listener: socket.socket
    password: str

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"


def announced(console: Console, options: Options, port: int) -> Opening:
    """Listen on the port, choose a password, and print both. Raise DemoError if the port is in use."""
    opening = Opening(listening_socket(port), secrets.token_urlsafe(9))
    end = "ends" if options.once else "keeps running until you press Ctrl-C"
    console.print(f"Admin:  [bold]{opening.address}/admin/[/]", soft_wrap=True)
    console.print(f"Login:  user [bold]{STAFF}[/], password [bold]{opening.password}[/]")
    console.print(
        f"The demo makes its tables, starts its servers, and sends {options.requests:,} requests from "
        f"{options.clients} clients. It waits until the usage is in the ledger, prints a report, and {end}.\n"
        "You can open the admin now: the first page comes as soon as the web server is up.",
        soft_wrap=True,
    )
    return opening


def variables(opening: Opening, turn: socket.socket) -> dict[str, str]:
    """Return the environment variables for a process that inherits the opening and the socket `turn`."""
    parts = {"listener": opening.listener.fileno(), "password": opening.password, "turn": turn.fileno()}
    return {_VARIABLE: json.dumps(parts)}


def inherited() -> tuple[Opening, socket.socket] | None:
    """Return what `variables` handed to this process. Return None if this is the first process of the demo."""
    # The web server and the worker need no password, so the variable ends here.
    text = os.environ.pop(_VARIABLE, None)
    if text is None:
        return None
    parts = json.loads(text)
    opening = Opening(socket.socket(fileno=parts["listener"]), parts["password"])
    return opening, socket.socket(fileno=parts["turn"])


def take_turn(turn: socket.socket) -> None:
    """Tell the first process that this one is ready to print, and wait until the first process prints no more.

    Two processes that move a line of the same terminal would overwrite each other's line.
    """
    with turn:
        turn.shutdown(socket.SHUT_WR)
        turn.recv(1)
