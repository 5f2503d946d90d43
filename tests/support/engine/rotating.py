"""Credentials of a server that change while calls are made."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import redis
from redis.credentials import CredentialProvider

from tests.support.eventually import until

THREADS, TASKS = 3, 3


class Provider(CredentialProvider):
    """A provider as a project writes it for IAM: it is asked for a user and a password at each connection."""

    def __init__(self) -> None:
        self.credentials = ("", "")

    def get_credentials(self) -> tuple[str, str]:
        return self.credentials

    async def get_credentials_async(self) -> tuple[str, str]:
        return self.credentials

    def tell(self) -> None:
        """Tell nobody of new credentials."""


class Streaming(Provider):
    """A provider that tells of new credentials, as the one for Entra ID does: only one function is called."""

    def __init__(self) -> None:
        super().__init__()
        self._tell: Callable[[Any], Any] = lambda token: None

    def on_next(self, callback: Callable[[Any], Any]) -> None:
        self._tell = callback

    def on_error(self, callback: Callable[[Exception], Any]) -> None:
        """Never fail."""

    def is_streaming(self) -> bool:
        return True

    def tell(self) -> None:
        self._tell(self.credentials)


class Users:
    """The users of some servers. A user is deleted when the next one has come, which ends all its connections."""

    def __init__(self, ports: Sequence[int], provider: Provider) -> None:
        self.provider = provider
        self._admins = [redis.Redis(port=port) for port in ports]
        self._number = 0
        self.add()

    def add(self) -> None:
        """Make another user, whose credentials the provider has from now on."""
        self._number += 1
        name, password = f"app-{self._number}", f"secret-{self._number}"
        for admin in self._admins:
            admin.execute_command("ACL", "SETUSER", name, "on", f">{password}", "allkeys", "allchannels", "+@all")
        self.provider.credentials = name, password

    def rotate(self, a_round: Callable[[], None]) -> None:
        """Replace the user by another one. `a_round` returns when each caller has begun and ended a call."""
        before, _password = self.provider.credentials
        self.add()
        self.provider.tell()
        a_round()
        for admin in self._admins:
            admin.execute_command("ACL", "DELUSER", before)
        a_round()

    def close(self) -> None:
        for admin in self._admins:
            admin.execute_command("ACL", "DELUSER", self.provider.credentials[0])
            admin.close()


class Callers:
    """Threads, and tasks of one event loop, that call a function without a pause until the block is left."""

    def __init__(self, ask: Callable[[], Any], ask_async: Callable[[], Any] | None = None) -> None:
        self._ask, self._ask_async = ask, ask_async
        self._ended = threading.Event()
        self.calls = [0] * (THREADS + (TASKS if ask_async is not None else 0))
        self.errors: list[str] = []
        self._threads = [threading.Thread(target=self._calls, args=(number,)) for number in range(THREADS)]
        if ask_async is not None:
            self._threads.append(threading.Thread(target=lambda: asyncio.run(self._tasks())))

    def _calls(self, number: int) -> None:
        while not self._ended.is_set():
            try:
                self._ask()
            except Exception as error:  # noqa: BLE001  (the test looks at it)
                self.errors.append(repr(error))
            self.calls[number] += 1

    async def _tasks(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(THREADS, THREADS + TASKS):
                group.create_task(self._async_calls(number))

    async def _async_calls(self, number: int) -> None:
        assert self._ask_async is not None
        while not self._ended.is_set():
            try:
                reply = self._ask_async()
                assert inspect.isawaitable(reply)
                await reply
            except Exception as error:  # noqa: BLE001  (the test looks at it)
                self.errors.append(repr(error))
            self.calls[number] += 1

    def a_round(self) -> None:
        """Wait until each caller has begun and ended a call."""
        before = list(self.calls)
        until(
            lambda: all(now >= then + 2 for now, then in zip(self.calls, before, strict=True)), "each caller has called"
        )

    def __enter__(self) -> Callers:
        for thread in self._threads:
            thread.start()
        self.a_round()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
