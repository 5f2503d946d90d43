"""Report lines as CloudEvents 1.0 in JSON, for OpenMeter or a billing system.

A billing system knows an event by its source and id, and takes each once. The id of a finalised line's event is the
line_id, so sending a report again changes nothing. A provisional line may still change: its event has a type of its
own, to which no bill should listen, and an id that changes with it, so that it never stands in the final one's way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from urllib.parse import quote

from ratelimits.conf import conf
from ratelimits.engine.keys import ANONYMOUS
from ratelimits.reports.exports.chunks import encoded
from ratelimits.reports.exports.json import array, line, schema_id, text
from ratelimits.reports.periods import iso
from ratelimits.reports.rows import FINAL, VERSION, Row

FINAL_LINE = "ratelimits.report.line.v1"
PROVISIONAL_LINE = "ratelimits.report.provisional-line.v1"

_EVENT = (
    '{"specversion":"1.0","id":%s,"source":%s,"type":"%s","subject":%s,"time":"%s","datacontenttype":"application/json",'
    '"dataschema":"%s#/$defs/line","data":%s}'
)


def source() -> str:
    """Who says it: the project, by its NAMESPACE."""
    return f"/ratelimits/{quote(conf.NAMESPACE, safe='')}"


def stream(rows: Iterable[Row], _version: int = VERSION) -> Iterator[bytes]:
    """A JSON batch (an array of events), in chunks; reads only a little ahead of what it has given away."""
    yield from encoded(array(_events(rows)))
    yield b"\n"


def stream_lines(rows: Iterable[Row], _version: int = VERSION) -> Iterator[bytes]:
    """The same events as JSON lines, one each: easily split into requests of a size that a receiver takes."""
    return encoded(f"{each}\n" for each in _events(rows))


def _events(rows: Iterable[Row]) -> Iterator[str]:
    sender = text(source())
    for row in rows:
        # CloudEvents has no empty subjects.
        yield event(row, sender, row.account or ANONYMOUS)


def event(row: Row, sender: str, subject: str) -> str:
    """Return the event of a line as JSON, from a sender (as JSON has it) about a subject."""
    data, name, kind = line(row), row.line_id, FINAL_LINE
    if row.status != FINAL:
        name, kind = f"{name}-{hashlib.sha256(data.encode()).hexdigest()[:16]}", PROVISIONAL_LINE
    # The last moment within: the end itself is already the next period's.
    time = iso(row.charge_period_end - 1)
    return _EVENT % (text(name), sender, kind, text(subject), time, schema_id(row.columns_version), data)
