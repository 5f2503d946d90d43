"""The conditions that the database checks for each row of the table of rules."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.models import Q

from ratelimits.algorithms.limits import ALGORITHMS
from ratelimits.models.fields.rule_fields import PARAMETERS, required_fields


def has_required_fields() -> Q:
    """Return the condition for complete rows. A row is complete if it has all fields that its algorithm requires."""
    condition = Q()
    for algorithm, algorithm_class in ALGORITHMS.items():
        complete = Q(algorithm=algorithm)
        for name in required_fields(algorithm):
            filled = ~Q(**{name: ""}) if PARAMETERS[name] == "" else Q(**{f"{name}__isnull": False})
            complete &= filled
        if algorithm_class.needs_max_wait:
            complete &= Q(max_wait__isnull=False)
        condition |= complete
    return condition


def may_prefetch() -> Q:
    """Return the condition for rows whose permits can be prefetched. An empty field stands for its default value."""
    condition = Q()
    for algorithm, algorithm_class in sorted(ALGORITHMS.items()):
        if algorithm_class.prefetch_where is not None:
            allowed = {f"{name}__in": ["", *values] for name, values in algorithm_class.prefetch_where.items()}
            condition |= Q(algorithm=algorithm, **allowed)
    return condition


def constraint(name: str, condition: Q, message: Any) -> models.CheckConstraint:
    """Return a constraint of the table of rules. `message` tells people what to write instead."""
    return models.CheckConstraint(condition=condition, name=f"ratelimits_rule_{name}", violation_error_message=message)
