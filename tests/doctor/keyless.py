"""A proxy that lets a server refuse scripts without a Redis key, as Amazon ElastiCache Serverless does."""

from __future__ import annotations

import socket
from typing import Any

import hiredis

from tests.support.engine.proxy import Pair, Proxy

#: The script that answers in the place of a refused one.
_REFUSES = b"return redis.error_reply('ERR Lua scripts without any input keys are not supported.')"


class _Rewritten:
    """A socket whose commands are read with other scripts in the place of those without keys."""

    def __init__(self, source: socket.socket) -> None:
        self._source = source
        self._reader = hiredis.Reader()

    def recv(self, size: int) -> bytes:
        packed = b""
        while not packed:
            data = self._source.recv(size)
            if not data:
                return b""
            self._reader.feed(data)
            while (command := self._reader.gets()) is not False:
                packed += _packed(command)
        return packed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


class KeylessRefused(Proxy):
    """Forward commands. A script without keys is replaced by one that returns the error of such servers."""

    def _forward(self, source: socket.socket, target: socket.socket, pair: Pair, requests: bool) -> None:
        super()._forward(_Rewritten(source) if requests else source, target, pair, requests)  # type: ignore[arg-type]


def _packed(command: Any) -> bytes:
    parts = [b"EVAL", _REFUSES, b"0"] if command[0].upper() == b"EVAL" and command[2] == b"0" else command
    return b"".join([b"*%d\r\n" % len(parts), *(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)])
