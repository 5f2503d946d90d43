"""The moment for which a user asks, typed as "12:04" or "2026-11-23 12:04"."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta

from django.utils.translation import gettext as _

#: Maximum number of characters of a typed moment.
MAX_LENGTH = 30


class NoMomentError(ValueError):
    """Raised if the typed text is not a moment of the past. The error's text says what to write."""


def typed_moment(text: str, now: float) -> int | None:
    """Return the moment of a typed text, in seconds since 1970 UTC; None for "".

    A time without a date means today, or yesterday if this time has not come yet today. A text without an offset such
    as +02:00 is in UTC. Raise NoMomentError if the text is not a moment of the past.
    """
    if not text:
        return None
    seconds = _parsed(text[: MAX_LENGTH + 1], datetime.fromtimestamp(now, UTC))
    if seconds is None or not 0 <= seconds <= now:
        problem = _("“%(text)s” is not a time that has passed. Write 12:04, or 2026-11-23 12:04 with the date, in UTC.")
        raise NoMomentError(problem % {"text": text[:MAX_LENGTH]})
    return int(seconds)


def _parsed(text: str, now: datetime) -> float | None:
    """Return the moment of a text, in seconds since 1970 UTC; None if the text is not a moment."""
    try:
        clock = time.fromisoformat(text)
        zone = clock.tzinfo or UTC
        today = datetime.combine(now.astimezone(zone).date(), clock, zone)
        return (today if today <= now else today - timedelta(days=1)).timestamp()
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
