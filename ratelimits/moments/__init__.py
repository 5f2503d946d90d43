"""Moments: read them, show them, and say what the time is, here and by a database's clock.

No other module of the app asks Django about time zones.

A moment of the app is always an aware datetime, whatever the project's `USE_TZ` is. With `USE_TZ=False`, Django and
the project's own code use datetimes without a time zone. `read` and `typed` make moments of them.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import connections
from django.utils import timezone
from django.utils.translation import gettext as _

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: By the kind of the database: a query for the seconds since 1970 UTC. (In SQLite, the clock is that of this machine.)
_QUERIES = {
    "postgresql": "SELECT EXTRACT(EPOCH FROM clock_timestamp())",
    "sqlite": "SELECT CAST(strftime('%s', 'now') AS REAL) + strftime('%f', 'now') - strftime('%S', 'now')",
}


def now() -> datetime:
    """Return the present moment, in UTC."""
    return datetime.now(UTC)


def moment(microseconds: int) -> datetime:
    """Return a moment (µs since 1970 UTC) as a datetime in UTC.

    Raise OverflowError if `datetime` has no such date.
    """
    return _EPOCH + timedelta(microseconds=microseconds)


def when(microseconds: int) -> str:
    """Return a moment (µs since 1970 UTC) as a text. Also accept a number that is outside of the calendar."""
    try:
        return f"{moment(microseconds):%Y-%m-%d %H:%M:%S} UTC"
    except OverflowError:
        return f"{microseconds} µs after 1970, which is in no calendar"


def zone() -> tzinfo:
    """Return the time zone in which people read and type moments.

    This is Django's current time zone. With `USE_TZ=False`, it is TIME_ZONE, because Django then has only this one.
    """
    return timezone.get_current_timezone() if settings.USE_TZ else timezone.get_default_timezone()


def zone_name() -> str:
    """Return the name of this time zone."""
    return str(zone())


def local(moment: datetime) -> datetime:
    """Return a moment in this time zone."""
    return moment.astimezone(zone())


def local_text(moment: datetime) -> str:
    """Return a moment as text, in this time zone, with the zone's short name: "2026-11-25 18:00 PST"."""
    return f"{local(moment):%Y-%m-%d %H:%M %Z}"


def read(value: datetime) -> datetime:
    """Return the moment of a datetime that the project's code made.

    With `USE_TZ=False`, a datetime without a time zone is a local time in TIME_ZONE, as in Django. With `USE_TZ=True`
    it is returned as it is: where a moment is stored, Django warns about it.
    """
    if value.tzinfo is not None or settings.USE_TZ:
        return value
    return value.replace(tzinfo=timezone.get_default_timezone()).astimezone(UTC)


def typed(value: datetime) -> datetime:
    """Return the moment of a datetime that a person typed. Without a time zone, it is a local time in `zone()`.

    Raise ValidationError for a local time that does not exist or comes twice, because the clocks change.
    """
    if value.tzinfo is not None:
        return value
    here = value.replace(tzinfo=zone())
    if here.utcoffset() != here.replace(fold=not here.fold).utcoffset():
        raise ValidationError(
            _("The clocks of %(zone)s change: the time %(time)s does not exist or comes twice. Choose another time.")
            % {"zone": zone_name(), "time": f"{value:%Y-%m-%d %H:%M}"},
            code="ambiguous",
        )
    return here.astimezone(UTC)


def untyped(moment: datetime) -> datetime:
    """Return a moment as Django's forms expect it: with `USE_TZ=False`, a local time in TIME_ZONE."""
    return moment if settings.USE_TZ or moment.tzinfo is None else local(moment).replace(tzinfo=None)


def now_of(using: str) -> datetime:
    """Return the present moment by the clock of a database, in UTC, also within a transaction.

    It is the one clock that all workers share.
    """
    with connections[using].cursor() as cursor:
        cursor.execute(_QUERIES[connections[using].vendor])
        (seconds,) = cursor.fetchone()
    return datetime.fromtimestamp(float(seconds), UTC)
