"""All that the app reads from outside, as functions of bytes. Any bytes are read, or refused by a known error."""

from __future__ import annotations

import gzip
import hashlib
import json
import tempfile
from base64 import urlsafe_b64encode
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from django.core.exceptions import ValidationError
from django.http import HttpRequest
from django.test import override_settings
from rest_framework.exceptions import ValidationError as RefusedValue

from ratelimits import as_code
from ratelimits.addresses import address_of
from ratelimits.algorithms import typed_numbers, typed_rates
from ratelimits.algorithms.calendar import parse_anchor
from ratelimits.billing.pricing import tiers
from ratelimits.billing.reports.verify import manifest, manifest_sections
from ratelimits.models import Account, KeyOverride, PlanMembership
from ratelimits.models.access import targets
from ratelimits.models.fields.scopes import names_in
from ratelimits.row_files.tables import TABLES, BadFileError, read
from ratelimits.simulate.lines import Reader, decode_json, json_lines, read_rules
from ratelimits.usage.api.serializers import UsageQuery, cursor
from ratelimits.usage.api.windows import PagePosition
from ratelimits.usage.ledger.packet import Unreadable, packet, unescaped, values
from ratelimits.usage.ledger.retention import archive
from tests.support.servers import memory_folder

_RULE = {"algorithm": "token_bucket", "capacity": 10, "rate": "5", "period": 1}


class Target(NamedTuple):
    """Something that is read, with inputs that are valid.

    read     reads an input
    refused  the errors by which `read` refuses an input. Any other exception is a fault
    valid    inputs that are read without an error
    around   returns a context in which inputs are read. It is entered once for many inputs
    """

    name: str
    read: Callable[[bytes], object]
    refused: tuple[type[Exception], ...]
    valid: tuple[bytes, ...]
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    def feed(self, data: bytes) -> None:
        """Read an input that may be refused."""
        with suppress(*self.refused):
            self.read(data)


def _text(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


def _trace(data: bytes) -> None:
    reader = Reader(read_rules(_RULE))
    for _number, value in json_lines(data.split(b"\n")):
        reader.line(value)


#: One object for all inputs, because Django REST framework takes long to make it.
_query = cache(UsageQuery)


def _cursor(text: str) -> None:
    query = _query()
    query.validate_cursor(query.fields["cursor"].run_validation(text))


def _trusted_proxies() -> AbstractContextManager[object]:
    return override_settings(RATELIMITS={"TRUSTED_PROXIES": ["10.0.0.0/8"], "ADDRESS_HEADER": "X-Forwarded-For"})


def _forwarded(text: str) -> None:
    request = HttpRequest()
    request.META = {"HTTP_X_FORWARDED_FOR": text, "REMOTE_ADDR": "10.0.0.1"}
    address = address_of(request)
    assert address.startswith("ip:")
    assert len(address) < 60


def _batch(data: bytes) -> None:
    """Read the fields of a sealed batch: name and value take turns, a line each."""
    lines = data.split(b"\n")
    for line in packet(3, zip(lines[::2], lines[1::2], strict=False)).lines:
        assert len([unescaped(value) for value in values(line)]) == 14


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="ratelimits-fuzz-", dir=memory_folder()))


def _archive(data: bytes) -> None:
    """Read a file whose digest is right, so that its lines are looked at."""
    digest = hashlib.sha256(data if data.endswith(b"\n") else data + b"\n").hexdigest()
    content = (data if data.endswith(b"\n") else data + b"\n") + f"end {digest}\n".encode()
    path = _folder() / "archive.gz"
    path.write_bytes(gzip.compress(content, 1))
    list(archive.read(path, digest))


def _archive_file(data: bytes) -> None:
    path = _folder() / "file.gz"
    path.write_bytes(data)
    list(archive.read(path, hashlib.sha256(_EMPTY).hexdigest()))


_IDENTITY = b"#i\ni\n#s\n1\n#o\n1\n#r\nr\n#p\n7\n#q\n3\n#f\n\n#t\n2\n#x\nr\n#c\n%d\n"
_EMPTY = b"ratelimits archive 3\n"
_ARCHIVED = (
    b'{"shard": 1, "incarnation": "i", "seq": 1, "line_count": 1, "parts": "00", "part_salts": "",'
    b' "applied_at": "2026-07-01T00:00:00+00:00"}\na\tb\n'
)
_MANIFEST = {
    "format": manifest.FORMAT,
    "month": "2026-07",
    "open": [],
    **{section: {} for section in manifest._OBJECTS},
    "conditional": {},
    "columns": {section: [] for section in (*manifest_sections.TABLES, "deliveries")},
    "signature": "",
    "written_at": "2026-08-01T00:00:00+00:00",
    "history": {},
    "shards": {"0": [1, "x"]},
}

_UPLOADS: dict[Any, tuple[bytes, ...]] = {
    PlanMembership: (b"key,plan\nuser:1,pro\n", b"\xef\xbb\xbfKey;plan;valid_from\nuser:1;pro;2026-01-01\n"),
    KeyOverride: (b'key\trule\treason\nuser:1\t"a"\t"said ""no"""\n',),
    Account: (b"identifier,name\r\n1,Acme\r\n",),
}

TARGETS = (
    Target(
        "rules as code",
        as_code.parse,
        (as_code.RefusedError,),
        (
            b'{"plans": {"pro": {"name": "Pro", "includes": {"requests": 10000}}}, "rules": []}',
            b'{"rules": [{"name": "a", "algorithm": "gcra", "capacity": 1, "rate": 5, "period": 1, "scope": "x:GET"}]}',
        ),
    ),
    Target(
        "a rule file",
        lambda data: read_rules(decode_json(data)),
        (ValueError,),
        (
            json.dumps(_RULE).encode(),
            b'[{"algorithm": "calendar_window", "capacity": 5, "calendar_unit": "month", "timezone": "Europe/Paris"}]',
            b'{"algorithm": "smooth_warming_up", "rate": 5e-2, "period": 1, "warm_up": 3, "cold_factor": 3}',
        ),
    ),
    Target(
        "a trace",
        _trace,
        (ValueError,),
        (
            b'{"at": 12.5, "op": "try_acquire", "cost": 3, "key": "a"}\n{"at": 13}',
            b'{"at": 1, "op": "set_rule", "rule": {"algorithm": "fixed_window", "capacity": 5, "period": 60}}',
        ),
    ),
    *(
        Target(
            f"uploaded rows of {model.__name__}",
            partial(lambda data, table: read(data, table), table=TABLES[model]),
            (BadFileError,),
            valid,
        )
        for model, valid in _UPLOADS.items()
    ),
    Target("a typed rate", lambda data: typed_rates.rate(_text(data)), (ValueError,), (b"10/5min", b"5 per 1 day")),
    Target("a length of time", lambda data: typed_rates.seconds(_text(data)), (ValueError,), (b"1 day 12 h", b"90")),
    Target("a typed number", lambda data: typed_numbers.decimal(_text(data)), (ValueError,), (b"1000.5", b"1 000")),
    Target("tiers", lambda data: tiers.parse(_text(data)), (ValueError,), (b"1000: 0.10\nmore: 0.05 + 3",)),
    Target("an anchor", lambda data: parse_anchor(_text(data)), (ValueError,), (b"2026-01-31T06:00",)),
    Target("names of scopes", lambda data: names_in(_text(data)), (), (b"health, webhooks",)),
    Target(
        "a blocked key or network",
        lambda data: targets.canonical(_text(data)),
        (ValidationError,),
        (b"203.0.113.0/24", b"ip:2001:db8::/32", b"user:42"),
    ),
    Target(
        "a header with addresses",
        lambda data: _forwarded(_text(data)),
        (),
        (b"203.0.113.9, 10.0.0.7", b"[2001:db8::1]:80"),
        _trusted_proxies,
    ),
    Target(
        "a cursor",
        lambda data: _cursor(_text(data)),
        (RefusedValue,),
        (cursor(PagePosition(1, "a", "b", "c")).encode(),),
    ),
    Target(
        "a decoded cursor",
        lambda data: _cursor(urlsafe_b64encode(data).decode()),
        (RefusedValue,),
        (b'[1, "a", "b", "c"]',),
    ),
    Target(
        "a manifest",
        lambda data: manifest.parse(_text(data)),
        (manifest.ManifestError,),
        (json.dumps(_MANIFEST).encode(),),
    ),
    Target("a sealed batch", _batch, (Unreadable,), (_IDENTITY % 9 + b"a|900|requests|1|1|acme|user:1|1\n1",)),
    Target("an archive's lines", _archive, (archive.ArchiveError,), (_EMPTY + _ARCHIVED,)),
    Target(
        "an archive's file",
        _archive_file,
        (archive.ArchiveError,),
        (
            gzip.compress(
                b"ratelimits archive 3\nend %b\n" % hashlib.sha256(b"ratelimits archive 3\n").hexdigest().encode()
            ),
        ),
    ),
)
