"""Wait in sync code for the result of an async function of the project."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
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
