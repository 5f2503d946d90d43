"""Metrics and spans, for Prometheus and OpenTelemetry. The setting TELEMETRY names which of them a project uses.

Without this setting, this package imports neither of them, and decisions are not observed.

Who knows a number that does not come from decisions adds a function that reads it to `sources`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

from ratelimits.answers import observing
from ratelimits.conf import conf

#: For each value of the setting TELEMETRY: the module with its observers. The value is also the name of a pip extra.
_MODULES = {"prometheus": "ratelimits.telemetry.prometheus", "opentelemetry": "ratelimits.telemetry.opentelemetry"}
#: The modules that observe decisions now.
_watching: list[ModuleType] = []
#: Seconds for which the readings are cached, so that frequent scrapes do not load the database.
CACHE_SECONDS = 5.0


def start() -> None:
    """Begin to observe decisions, as TELEMETRY says. Raise ImproperlyConfigured if a package is not installed."""
    stop()
    try:
        names = conf.TELEMETRY
    except ImproperlyConfigured:
        return  # `manage.py check` reports that the setting is wrong.
    for name in names:
        try:
            module = import_module(_MODULES[name])
        except ModuleNotFoundError as error:
            raise ImproperlyConfigured(
                f'RATELIMITS["TELEMETRY"] names {name!r}: `pip install "django-ratelimits[{name}]"`. {error}'
            ) from error
        observing.observers.append(module.observe)
        observing.breaker_observers.append(module.breaker_changed)
        _watching.append(module)


def stop() -> None:
    """Stop observing decisions."""
    while _watching:
        module = _watching.pop()
        observing.observers.remove(module.observe)
        observing.breaker_observers.remove(module.breaker_changed)


def _restart(setting: str, **kwargs: object) -> None:
    if setting == "RATELIMITS":
        start()


setting_changed.connect(_restart, dispatch_uid="ratelimits.telemetry")


@dataclass(frozen=True, slots=True)
class Reading:
    """One number: the name of its metric, what it means, its labels, and its value."""

    name: str
    meaning: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()


#: The functions that read the numbers. They raise nothing: a number that cannot be read is missing.
sources: list[Callable[[], Iterable[Reading]]] = []
#: The moment until which the cached readings are used (by `time.monotonic`), and these readings.
_cached: tuple[float, list[Reading]] = (0.0, [])


def readings() -> list[Reading]:
    """Return all numbers that can be read."""
    global _cached
    until, found = _cached
    now = time.monotonic()
    if now >= until:
        found = [reading for source in sources for reading in source()]
        _cached = now + CACHE_SECONDS, found
    return found


def forget() -> None:
    """Empty the cache, so that the next call of `readings` reads everything again."""
    global _cached
    _cached = 0.0, []
