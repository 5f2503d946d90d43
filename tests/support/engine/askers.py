"""Ask by the connections of the app in each way: sync and async, and with each kind of pool."""

from __future__ import annotations

import asyncio
from typing import Any

import redis

from ratelimits.engine.transport.wire import Wire
from tests.support.engine.saying import say

INCREASE = say(b"INCR", b"counter")
#: Options of the cache alias with which each kind of pool is used.
POOLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a pool of its own": {"CONNECTION_POOL_CLASS": "tests.engine.transport.test_wire.Pool"},
    "a parser of its own": {"PARSER_CLASS": "tests.support.engine.askers.Parser"},
}


class Parser(redis.connection.DefaultParser):  # type: ignore[misc, valid-type]
    """A parser of an unknown class."""


class Asker:
    """Ask by a wire: by the sync functions, or by the async ones in one event loop."""

    def __init__(self, wire: Wire, is_async: bool) -> None:
        self.wire = wire
        self._runner = asyncio.Runner() if is_async else None

    def __call__(self, command: Any = INCREASE) -> Any:
        if self._runner is None:
            return self.wire.call(command, b"")
        return self._runner.run(self.wire.acall(command, b""))

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *error: object) -> None:
        if self._runner is not None:
            self._runner.close()
