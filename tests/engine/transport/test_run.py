"""Test how a server's run is named, also by servers that hide what others tell."""

from __future__ import annotations

import pytest
import redis
from redis.exceptions import ResponseError

from ratelimits.engine.transport.connection import RUN_SCRIPT, UNREADABLE, read_run, run_after

RUN, REPLICATION = "a" * 40, "b" * 40
NEVER_PROMOTED, PROMOTED = "0" * 40, "c" * 40
#: What a server that was never promoted tells of its replication.
NOTHING_SPECIAL = f"\nmaster_replid:{REPLICATION}\r\nmaster_replid2:{NEVER_PROMOTED}\r\n"
#: Stands before the script: INFO then answers with a text, or with an error for a section that is not in the table.
SECTIONS = """
local told = {replication = ARGV[1], server = ARGV[2]}
local redis = {pcall = function(_, name) return told[name] ~= '' and told[name] or {err = 'NOPERM'} end}
"""


@pytest.mark.parametrize(
    ("replication", "server", "run"),
    [
        (NOTHING_SPECIAL, f"\nrun_id:{RUN}\r\n", f"{RUN}:"),
        (
            f"\nmaster_replid:{REPLICATION}\r\nmaster_replid2:{PROMOTED}\r\n",
            f"\nrun_id:{RUN}\r\n",
            f"{RUN}:{REPLICATION}",
        ),
        (
            f"\nmaster_replid:{REPLICATION}\r\nmaster_replid2:{NEVER_PROMOTED}\r\n",
            "\ntcp_port:1\r\n",
            f"{REPLICATION}:",
        ),
        ("", f"\nrun_id:{RUN}\r\n", f"{RUN}:"),
        ("\nrole:master\r\n", "\ntcp_port:1\r\n", UNREADABLE),
        ("", "", UNREADABLE),
    ],
    ids=["told", "promoted", "hidden", "only the server", "all hidden", "refused"],
)
def test_the_run_comes_from_what_the_server_tells(
    redis_client: redis.Redis, replication: str, server: str, run: str
) -> None:
    reply = redis_client.eval(SECTIONS + RUN_SCRIPT.text.decode(), 0, replication, server)
    assert isinstance(reply, bytes)
    assert reply.decode() == run


def test_a_server_tells_its_run(redis_client: redis.Redis) -> None:
    info = redis_client.info()
    assert isinstance(info, dict)
    assert read_run(redis_client) == f"{info['run_id']}:"


def test_a_server_that_refuses_scripts_has_an_unreadable_run() -> None:
    refusal = ResponseError("unknown command 'EVAL', with args beginning with: ")
    assert run_after(refusal) == UNREADABLE
    with pytest.raises(ResponseError, match="BUSY"):
        run_after(ResponseError("BUSY Redis is busy running a script"))
