"""Ask a server for its run. Everything that needs the run asks here, or calls the same lua/run.lua in its own script.

A run is the time from a start of the server until it restarts or a replica is promoted. The server itself names the
run, in a script: proxies can change the reply to INFO, but not what a script reads.
"""

from __future__ import annotations

from typing import Any

import redis
from redis.exceptions import ResponseError

from ratelimits.engine.assemble import scripts
from ratelimits.engine.resp import resp
from ratelimits.engine.transport.refused import refused

#: The name of a run that the server does not tell. Then nobody can know whether the server restarted.
UNREADABLE = "unreadable:"
#: The script that returns the run of the server.
SCRIPT = scripts.script(scripts.text("run") + "\nreturn server_run()")
#: How Amazon ElastiCache Serverless refuses a script without a Redis key.
_KEYLESS = "scripts without any input keys"
#: The command that asks for the run: the first command on each connection.
ASK_RUN = resp(b"EVAL", SCRIPT.text, b"0")


def run_of(reply: bytes | str) -> str:
    """Return the run from the reply to `ASK_RUN`."""
    return reply.decode(errors="replace") if isinstance(reply, bytes) else str(reply)


def run_after(error: ResponseError) -> str:
    """Return the run if the server answers `ASK_RUN` with this error. Raise the error if it refuses no command.

    A server that refuses EVAL can still decide by EVALSHA. Some servers refuse only scripts without a Redis key, as
    `ASK_RUN` is one.
    """
    if refused(error) is None and _KEYLESS not in str(error):
        raise error
    return UNREADABLE


def read_run(client: redis.Redis, key: str | None = None) -> str:
    """Return the run of the client's server. Raise redis.exceptions.RedisError if the server does not answer.

    `key` is any Redis key of the app on this server. It is neither read nor written. Without it, some servers refuse
    the script, and the run is unreadable.
    """
    keys = [] if key is None else [key]
    try:
        reply: Any = client.eval(SCRIPT.text.decode(), len(keys), *keys)
    except ResponseError as error:
        return run_after(error)
    return run_of(reply)
