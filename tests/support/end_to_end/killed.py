"""A sibling (see tests.support.siblings) that kills processes. An order is a user and a number of requests.

For each order it forks a process that makes requests for this user. When this number was admitted, it kills the
process. It answers with the number of requests that the process had seen admitted.
"""

from __future__ import annotations

import mmap
import os
import signal
from typing import Any

import django

from tests.support.siblings import obey

#: Bytes of a signed integer of the machine.
_SIZE = 8


def spend(user: str, count: memoryview) -> None:
    """Make requests until the process is killed. Write the number of admitted requests to `count[0]`."""
    from ratelimits.identity import Identity
    from ratelimits.quota import checking

    identity, admitted = Identity(user, None, "account:acme"), 0
    while checking.check(identity).allowed:
        admitted += 1
        # One store of 8 bytes. struct.pack_into would write them one by one, and a kill could come in between.
        count[0] = admitted


def kill(_number: int, order: Any) -> int:
    """Carry out an order."""
    user, requests = order
    count = memoryview(mmap.mmap(-1, _SIZE)).cast("q")
    child = os.fork()
    if child == 0:
        try:
            spend(user, count)
        finally:
            os._exit(1)
    while count[0] < requests:
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the process has ended"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return int(count[0])


if __name__ == "__main__":
    django.setup()
    obey(kill)
