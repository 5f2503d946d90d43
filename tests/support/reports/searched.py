"""Search all rows of all tables of the app for texts: generically, so that a new column is searched too."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any

from django.db import connection

from tests.support.own_apps import own_models


def tables() -> Iterator[str]:
    """Yield the tables of the app and of Django's log, as the database has them."""
    own = own_models(include_auto_created=True)
    for model in own:
        if model._meta.managed and not model._meta.proxy:
            yield model._meta.db_table
    yield "django_admin_log"


def values(table: str) -> Iterator[tuple[str, str]]:
    """Yield each value of a table as a text, with the name of its column. Compressed bytes are decompressed."""
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT * FROM {connection.ops.quote_name(table)}")
        columns = [str(column[0]) for column in cursor.description]
        for row in cursor.fetchall():
            for name, value in zip(columns, row, strict=True):
                yield name, _text(value)


def _text(value: Any) -> str:
    if isinstance(value, bytes | memoryview):
        raw = bytes(value)
        with suppress(zlib.error):
            raw = zlib.decompress(raw)
        return raw.decode(errors="replace")
    return str(value)


def found(texts: Collection[str]) -> list[str]:
    """Return where the tables have one of these texts: table, column and value."""
    return [
        f"{table}.{name}: {value[:200]}"
        for table in tables()
        for name, value in values(table)
        if any(text in value for text in texts)
    ]
