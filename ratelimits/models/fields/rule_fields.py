"""The fields that only rules with some algorithms use, and functions that make fields for rules and overrides."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from django.db import models

from ratelimits.algorithms.limits import ALGORITHMS
from ratelimits.models.fields.durations import SecondsField

#: The fields that only some algorithms have. Beside each field is the value that a rule stores in this field if the
#: rule's algorithm does not have the field.
PARAMETERS: dict[str, Any] = {
    "capacity": None,
    "rate": None,
    "period": None,
    "initial": "",
    "window_start": "",
    "calendar_unit": "",
    "timezone": "",
    "anchor": "",
    "sub_windows": None,
    "weighted": False,
    "delay_after": None,
    "max_burst_seconds": None,
    "warm_up": None,
    "cold_factor": None,
    "lease_ttl": None,
}
#: The prefix lengths by which addresses are counted if a rule has no prefix lengths of its own.
IPV4_PREFIX, IPV6_PREFIX = 32, 64


def required_fields(algorithm: str) -> tuple[str, ...]:
    """Return the names of the algorithm's fields that have no default value."""
    algorithm_class = ALGORITHMS[algorithm]
    return tuple(field.name for field in fields(algorithm_class) if field.default is MISSING)


def decimal_field(label: Any, help_text: Any) -> models.DecimalField[Any, Any]:
    """Return an optional decimal field with six decimal places. The engine accepts no more than six."""
    return models.DecimalField(label, max_digits=15, decimal_places=6, null=True, blank=True, help_text=help_text)


def seconds_field(label: Any, help_text: Any) -> SecondsField:
    """Return an optional field for seconds with six decimal places. The engine accepts no more than six."""
    return SecondsField(label, max_digits=15, decimal_places=6, null=True, blank=True, help_text=help_text)
