"""Read the moments that people type after a command."""

from __future__ import annotations

from datetime import datetime

from django.utils.dateparse import parse_date, parse_datetime

from ratelimits import moments


def typed_moment(text: str) -> datetime | None:
    """Return the moment of a text such as 2026-11-30T18:00+01:00 or 2026-11-30; None if the text is no moment.

    Without an offset, it is a local time. Raise ValidationError if there is no such local time, or if it comes twice.
    """
    moment = parse_datetime(text)
    if moment is None and (day := parse_date(text)) is not None:
        moment = datetime(day.year, day.month, day.day)  # noqa: DTZ001  (the time zone is added below)
    return None if moment is None else moments.typed(moment)
