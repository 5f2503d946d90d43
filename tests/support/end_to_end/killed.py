"""A sibling (see tests.support.siblings) that kills processes. An order is a user and a number of requests.

For each order it forks a process that makes requests for this user. When this number was admitted, it kills the
process. It answers with the number of requests that the process had seen admitted.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
from typing import Any

import django

from tests.support.siblings import obey

_COUNT = struct.Struct("<q")


def spend(user: str, shared: mmap.mmap) -> None:
    """Make requests until the process is killed. Write the number of admitted requests to the shared memory."""
    from ratelimits.identity import Identity
    from ratelimits.quota import checking

    identity, admitted = Identity(user, None, "account:acme"), 0
    while checking.check(identity).allowed:
        admitted += 1
        _COUNT.pack_into(shared, 0, admitted)


def kill(_number: int, order: Any) -> int:
    """Carry out an order."""
    user, requests = order
    shared = mmap.mmap(-1, _COUNT.size)
    child = os.fork()
    if child == 0:
        try:
            spend(user, shared)
        finally:
            os._exit(1)
    while _COUNT.unpack_from(shared, 0)[0] < requests:
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the process has ended"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return int(_COUNT.unpack_from(shared, 0)[0])


if __name__ == "__main__":
    django.setup()
    obey(kill)
