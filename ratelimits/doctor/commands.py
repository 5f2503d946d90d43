"""The commands that the app sends to a server, by itself or in its scripts, and the parts of the app that need them.

`tests/doctor/test_commands.py` compares this table with the Lua files, and with what a server has counted while all
jobs of the app ran. So no command can be missing here, and none is too many.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from ratelimits.doctor.findings import Part, installed

#: A script that returns a number, to try the commands that send scripts.
_SCRIPT = "return 1"
_SHA = hashlib.sha1(_SCRIPT.encode(), usedforsecurity=False).hexdigest()
#: An argument in angle brackets stands for a Redis key of the doctor that has this type.
STRING, RENAMED, HASH, LIST, ZSET = "<string>", "<renamed>", "<hash>", "<list>", "<zset>"
KEYS = (STRING, RENAMED, HASH, LIST, ZSET)

_LIMITS, _LOGS, _LEASES = Part.LIMITS, Part.LOGS, Part.LEASES
_COUNTS, _BILLS, _RESTORES = Part.COUNTS, Part.BILLS, Part.RESTORES
_WAITS, _EDITS, _TRIES = Part.WAITS, Part.EDITS, Part.TRIES
_DECIDES = (_LIMITS, _LOGS, _LEASES, _COUNTS, _RESTORES)
_ALL = tuple(Part)
_ALL_BUT_RESTORES = tuple(part for part in Part if part is not _RESTORES)


@dataclass(frozen=True, slots=True)
class Used:
    """A command that the app sends.

    name         the command, such as "CONFIG GET"
    arguments    arguments with which the doctor tries the command
    alone        the parts that send it by itself
    in_scripts   the parts whose scripts send it
    replaceable  the parts that may work without it. Then only the part itself shows whether it does
    cluster      whether only a Redis Cluster gets it
    fence        the value of RATELIMITS["FENCE"] with which the app sends it; "" if it sends it with each value
    """

    name: str
    arguments: tuple[str, ...] = ()
    alone: tuple[Part, ...] = ()
    in_scripts: tuple[Part, ...] = ()
    replaceable: tuple[Part, ...] = ()
    cluster: bool = False
    fence: str = ""

    @property
    def parts(self) -> frozenset[Part]:
        """Return all parts that need the command."""
        return frozenset((*self.alone, *self.in_scripts))

    @property
    def right(self) -> str:
        """Return the right for `ACL SETUSER`, such as "+config|get"."""
        return "+" + self.name.lower().replace(" ", "|")


#: All commands, in an order in which each finds what it needs: a string exists before it is renamed.
USED = (
    # Without INFO nobody knows that the server restarts, so nothing is restored.
    Used("INFO", ("server",), _ALL, (_LIMITS, _COUNTS, _BILLS, _RESTORES), replaceable=_ALL_BUT_RESTORES),
    # Asked on a connection that was idle. If it is refused, the server has answered too.
    Used("PING", (), _ALL, replaceable=_ALL),
    Used("EVAL", (_SCRIPT, "0"), _ALL, replaceable=_DECIDES),
    Used("SCRIPT LOAD", (_SCRIPT,), (*_DECIDES, _TRIES), replaceable=(*_DECIDES, _TRIES)),
    Used("EVALSHA", (_SHA, "0"), (*_DECIDES, _TRIES), replaceable=(*_DECIDES, _TRIES)),
    Used("CONFIG GET", ("appendfsync",), (_BILLS,), replaceable=(_BILLS,), fence="aof"),
    Used("WAITAOF", ("0", "0", "1"), (_BILLS,), replaceable=(_BILLS,), fence="waitaof"),
    Used("WAIT", ("0", "1"), (_BILLS,), replaceable=(_BILLS,), fence="wait"),
    Used("CLUSTER SLOTS", (), _ALL, cluster=True),
    Used("CLUSTER INFO", (), _ALL, replaceable=_ALL, cluster=True),
    Used("TIME", (), (_BILLS,), (_LIMITS, _LOGS, _LEASES, _COUNTS, _BILLS, _RESTORES)),
    Used("SET", (STRING, "1", "PX", "60000"), (_BILLS, _TRIES), (_LIMITS, _LOGS, _LEASES, _COUNTS, _BILLS, _EDITS)),
    Used("GET", (STRING,), (_EDITS, _TRIES), (_LEASES, _COUNTS, _LIMITS, _EDITS)),
    Used("MGET", (STRING,), (), (*_DECIDES, _TRIES)),
    Used("EXISTS", (STRING,), (_BILLS,), (_LIMITS, _LOGS, _LEASES, _COUNTS, _BILLS, _RESTORES)),
    Used("PEXPIRE", (STRING, "60000"), (_BILLS,), (_LIMITS, _LOGS, _LEASES)),
    Used("TYPE", (STRING,), (_BILLS,), replaceable=(_BILLS,)),
    Used("DUMP", (STRING,), (_BILLS,), replaceable=(_BILLS,)),
    # The first write of scripts that must also write if the server's memory is full.
    Used(
        "PERSIST",
        (STRING,),
        (),
        (_LIMITS, _LOGS, _LEASES, _COUNTS, _BILLS, _EDITS),
        replaceable=(_LIMITS, _LOGS, _LEASES),
    ),
    Used("RENAME", (STRING, RENAMED), (), (_COUNTS, _BILLS)),
    Used("RENAMENX", (RENAMED, STRING), (), (_COUNTS, _BILLS)),
    Used("HSET", (HASH, "a", "1"), (_TRIES,), (_LOGS, _COUNTS, _BILLS, _RESTORES)),
    Used("HGET", (HASH, "a"), (_TRIES,), (_LOGS, _COUNTS)),
    Used("HEXISTS", (HASH, "a"), (), (_BILLS,)),
    # The first request of a run looks for the open batch of an earlier run.
    Used("HMGET", (HASH, "a", "b"), (_BILLS,), (_LIMITS, _LOGS, _LEASES, _COUNTS, _BILLS, _RESTORES)),
    Used("HGETALL", (HASH,), (_BILLS,), (_COUNTS, _BILLS)),
    Used("HINCRBY", (HASH, "n", "1"), (), (_COUNTS,)),
    Used("HLEN", (HASH,), (), (_COUNTS,)),
    Used("HSCAN", (HASH, "0"), (_BILLS, _TRIES)),
    Used("HDEL", (HASH, "n"), (_BILLS, _TRIES), (_LOGS, _COUNTS)),
    Used("RPUSH", (LIST, "a", "b", "c"), (), (_LOGS, _LEASES, _COUNTS, _BILLS)),
    Used("LLEN", (LIST,), (_BILLS,), (_LEASES, _BILLS)),
    Used("LINDEX", (LIST, "0"), (), (_LOGS,)),
    Used("LRANGE", (LIST, "0", "1"), (_BILLS,), (_LOGS, _LEASES, _BILLS)),
    Used("LSET", (LIST, "0", "a"), (), (_LOGS,)),
    Used("LREM", (LIST, "1", "b"), (), (_LOGS, _BILLS)),
    Used("LTRIM", (LIST, "0", "5"), (), (_LOGS, _LEASES)),
    Used("RPOP", (LIST,), (), (_LOGS,)),
    Used("BLPOP", (LIST, "0.002"), (_WAITS,)),
    Used("ZADD", (ZSET, "1", "a"), (), (_LIMITS, _LEASES)),
    Used("ZCARD", (ZSET,), (), (_LEASES,)),
    Used("ZCOUNT", (ZSET, "0", "1"), (), (_LEASES,)),
    Used("ZLEXCOUNT", (ZSET, "-", "+"), (), (_LEASES,)),
    Used("ZSCORE", (ZSET, "a"), (), (_LIMITS, _LEASES)),
    Used("ZRANGE", (ZSET, "0", "1"), (), (_LIMITS, _LEASES)),
    Used("ZRANGEBYSCORE", (ZSET, "0", "1"), (), (_LEASES,)),
    Used("ZREVRANGE", (ZSET, "0", "1"), (), (_LEASES,)),
    Used("ZREM", (ZSET, "a"), (), (_LIMITS, _LEASES)),
    Used("UNLINK", (STRING,), (_TRIES,), (_LIMITS, _LOGS, _LEASES, _BILLS)),
)


def rights(*, cluster: bool = False) -> Iterator[str]:
    """Yield all rights that the app's user needs for commands with the default settings, in the order of the table."""
    sent = (used for used in USED if (cluster or not used.cluster) and used.fence in ("", "aof"))
    return (used.right for used in sent if not used.parts.isdisjoint(installed()))
