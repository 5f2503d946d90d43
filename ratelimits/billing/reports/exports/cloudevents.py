"""Write report lines as CloudEvents 1.0 in JSON, for OpenMeter or a billing system.

A billing system identifies an event by its `source` and its `id`, and accepts each event once. The `id` of a final
line's event is the `line_id`, so sending a report again changes nothing.

A provisional line can still change. So its event has another type, and events of this type must not be billed. The
`id` of this event changes when the line changes, and is never the `id` of the final event.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from urllib.parse import quote

from ratelimits.billing.reports.exports.json import array, line, schema_id, text
from ratelimits.billing.reports.rows import FINAL, VERSION, Row
from ratelimits.conf import conf
from ratelimits.engine.keys import ANONYMOUS
from ratelimits.files import encoded
from ratelimits.usage.periods import iso

FINAL_LINE = "ratelimits.report.line.v1"
PROVISIONAL_LINE = "ratelimits.report.provisional-line.v1"

#: The template of an event. An encoder for JSON would take many times as long.
_EVENT = (
    '{"specversion":"1.0","id":%s,"source":%s,"type":"%s","subject":%s,"time":"%s","datacontenttype":"application/json",'
    '"dataschema":"%s#/$defs/line","data":%s}'
)


def source() -> str:
    """Return the `source` of the events. It contains the project's setting NAMESPACE."""
    return f"/ratelimits/{quote(conf.NAMESPACE, safe='')}"


def stream(rows: Iterable[Row], _version: int = VERSION) -> Iterator[bytes]:
    """Yield a JSON array of events in chunks. Each row is read shortly before it is written."""
    yield from encoded(array(_events(rows)))
    yield b"\n"


def stream_lines(rows: Iterable[Row], _version: int = VERSION) -> Iterator[bytes]:
    """Yield the events in chunks, one JSON document on each line. Such a file is easy to split into small requests."""
    return encoded(f"{text_of_event}\n" for text_of_event in _events(rows))


def _events(rows: Iterable[Row]) -> Iterator[str]:
    sender = text(source())
    for row in rows:
        # The subject of a CloudEvent must not be empty.
        yield event(row, sender, row.account or ANONYMOUS)


def event(row: Row, sender: str, subject: str) -> str:
    """Return the event of a report line as JSON. `sender` is the `source` as a JSON text."""
    data, event_id, kind = line(row), row.line_id, FINAL_LINE
    if row.status != FINAL:
        # The digest of the line's content makes a new `id` when the line changes. 16 of its hexadecimal digits suffice.
        event_id, kind = f"{event_id}-{hashlib.sha256(data.encode()).hexdigest()[:16]}", PROVISIONAL_LINE
    # This is the last moment of the charge period. The end itself belongs to the next period.
    time = iso(row.charge_period_end - 1)
    return _EVENT % (text(event_id), sender, kind, text(subject), time, schema_id(row.columns_version), data)
