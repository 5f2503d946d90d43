"""The type of the Redis client in the tests."""

from __future__ import annotations

from typing import Any, TypeAlias

#: redis-py's types do not say whether a client answers in text or in bytes. The clients of the tests answer in bytes.
RawRedis: TypeAlias = Any
