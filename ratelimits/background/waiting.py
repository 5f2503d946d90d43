"""Wait for the result of an async function in sync code, and for a server that perhaps hangs, but not too long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from asgiref.sync import async_to_sync
from django.core.exceptions import ImproperlyConfigured


def is_awaitable(value: Any) -> bool:
    """Return whether a value is the result of an async function. Do not load a lazy object."""
    return hasattr(type(value), "__await__")


def awaited(result: Any, function: str, view: str) -> Any:
    """Return the value of a result. Wait for it if the function was async.

    Raise ImproperlyConfigured, with the names of the function and of the view, if an event loop runs in this thread.
    """
    if not is_awaitable(result):
        return result
    if _is_in_loop():
        if isinstance(result, Coroutine):
            result.close()  # Otherwise Python warns that nobody has awaited it.
        raise ImproperlyConfigured(
            f"{function} is async, but {view} is decided by sync code in an event loop. Write a sync function, or make"
            " the view async."
        )
    return async_to_sync(_value)(result)


async def _value(result: Awaitable[Any]) -> Any:
    return await result


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def within(seconds: float, work: Callable[[], None], name: str) -> None:
    """Do the work in a thread of this name, and raise what the work raises.

    Raise TimeoutError if the work takes longer than `seconds`. A timeout of a socket is not enough: it limits only a
    single wait. Connecting is one wait, and each part of a reply is another one. After a TimeoutError, the thread goes
    on with the work. So each single wait of the work needs a timeout too, or else the thread could run for ever. The
    work must not use a database.
    """
    outcome = SimpleQueue[BaseException | None]()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  (raised again below, in the thread of the caller)
            outcome.put(error)
        else:
            outcome.put(None)

    Thread(target=run, daemon=True, name=name).start()
    try:
        error = outcome.get(timeout=max(seconds, 0.0))
    except Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if error is not None:
        raise error
