"""Say which fences would work on a server: only those, so that nobody goes from one refused fence to the next."""

from __future__ import annotations

from redis.exceptions import RedisError

from ratelimits.conf import conf
from ratelimits.doctor.scratch import Scratch
from ratelimits.engine.transport.connection import Unavailable
from ratelimits.engine.transport.run import read_run
from ratelimits.usage.fence import another_fence, other_fences


def others(scratch: Scratch) -> str:
    """Return a sentence that says which other values of RATELIMITS["FENCE"] would work, and why the rest would not."""
    try:
        tried = other_fences(scratch.server, read_run(scratch.client, scratch.key("fence")))
    except (RedisError, Unavailable, OSError):
        return f"{another_fence()}."
    working = [f'"{name}"' for name, error in tried.items() if error is None]
    failing = [f'"{name}" ({error.reason})' for name, error in tried.items() if error is not None]
    names = f"{', '.join(working[:-1])} and {working[-1]}" if len(working) > 1 else "".join(working)
    return (
        f"RATELIMITS['FENCE'] is \"{conf.FENCE}\". If nobody can change this server, it accepts {names or 'no other'}:"
        " docs/billing/pipeline.md says what the provider must promise for it."
        + (f" It does not accept {', '.join(failing)}." if failing else "")
    )
