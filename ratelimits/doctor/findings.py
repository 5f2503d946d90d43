"""A finding: one reason why parts of the app do not work on a server, and what would change it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ratelimits.doctor.parts import Part

#: What to do if the memory is full, or soon is.
MORE_MEMORY = (
    "If usage waits in Redis, drain it now: run a worker, or the commands ratelimits_seal and ratelimits_drain. If none"
    " waits, raise the server's maxmemory."
)


@dataclass(frozen=True, slots=True)
class ServerFinding:
    """One thing that is wrong with a server.

    name   an identifier, such as "command:HSET" or "evicts"
    parts  the parts that do not work because of it. If it is empty, everything works, but people should know it
    why    a sentence that says what is wrong
    mend   what to do: an ACL line, or a setting
    acl    the words for `ACL SETUSER <user>` that would change it; "" if no right would
    """

    name: str
    parts: frozenset[Part]
    why: str
    mend: str
    acl: str = ""

    @property
    def endangers(self) -> bool:
        """Return whether the parts work now, but can lose what they have written."""
        return self.name in ("evicts", "replay")


def merged(findings: Iterable[ServerFinding]) -> Iterator[ServerFinding]:
    """Yield findings of the same name as one, with the parts of all of them."""
    by_name: dict[str, ServerFinding] = {}
    for found in findings:
        first = by_name.get(found.name)
        by_name[found.name] = found if first is None else replace(first, parts=first.parts | found.parts)
    yield from by_name.values()
