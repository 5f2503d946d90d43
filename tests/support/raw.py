"""A Redis client as the tests read from it."""

from __future__ import annotations

from typing import Any, TypeAlias

#: redis-py's types leave open whether a client answers in text or in bytes; those of the tests answer in bytes.
RawRedis: TypeAlias = Any
