"""Test that for each value that the database refuses, the admin, rules as code and full_clean say what to write."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db import models

from ratelimits.billing.models import Adjustment
from ratelimits.models import KeyOverride, PlanMembership, Rule
from ratelimits.usage.models import AlertChannel
from tests.support.own_apps import own_models
from tests.support.rows import rule, unsaved

pytestmark = pytest.mark.django_db

MODELS = own_models()
CONSTRAINTS = [(model, each) for model in MODELS for each in model._meta.constraints]
#: Models that people edit; only workers write the other tables.
TYPED = {
    model
    for model, page in admin.site._registry.items()
    if type(page).has_add_permission is admin.ModelAdmin.has_add_permission
}


@pytest.mark.parametrize(("model", "constraint"), CONSTRAINTS, ids=[each.name for _model, each in CONSTRAINTS])
def test_every_constraint_has_a_sentence(model: type[models.Model], constraint: Any) -> None:
    assert {Rule, KeyOverride, PlanMembership, AlertChannel, Adjustment} <= TYPED
    if isinstance(constraint, models.CheckConstraint) or model in TYPED:
        said = str(constraint.get_violation_error_message())
        assert constraint.name not in said
        assert said[0].isupper()
        assert said.endswith(".")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rate": 0}, {"rate": "rate must be above 0, not 0."}),
        ({"period": 0}, {"period": "period must be above 0, not 0."}),
        ({"rate": -1, "period": -2}, {"rate": "must be above 0, not -1.", "period": "must be above 0, not -2."}),
        ({"capacity": -1, "rate": 0}, {"capacity": "capacity must be", "rate": "rate must be above 0, not 0."}),
        ({"max_wait": -1}, {"max_wait": "Write 0 if no request is allowed to wait"}),
        ({"max_wait": -1, "rate": 0}, {"rate": "rate must be above 0"}),
        ({"mode": "sometimes", "rate": 0}, {"mode": "not a valid choice", "rate": "rate must be above 0"}),
        ({"key_kind": "planet"}, {"key_kind": "not a valid choice"}),
        ({"on_failure": "panic"}, {"on_failure": "not a valid choice"}),
        ({"rate": None}, {"rate": "Write how many permits"}),
        ({"prefetch": 5}, {"prefetch": "Leave this empty"}),
        ({"rate": "fast", "period": "1 mo"}, {"rate": "must be a decimal", "period": "is not a length of time"}),
    ],
)
def test_a_number_that_makes_no_sense_is_said_at_its_field(wrong: dict[str, Any], said: dict[str, str]) -> None:
    with pytest.raises(ValidationError) as caught:
        unsaved(**wrong).full_clean()
    found = {name: " ".join(lines) for name, lines in caught.value.message_dict.items()}
    assert "Constraint" not in str(found)
    for name, text in said.items():
        assert text in found[name]


@pytest.mark.parametrize("wrong", [{"rate": 0}, {"period": 0}, {"rate": -1, "period": -1}])
def test_so_is_an_override_s(wrong: dict[str, Any]) -> None:
    rule()
    with pytest.raises(ValidationError) as caught:
        KeyOverride(key="user:1", rule="burst", **wrong).full_clean()
    assert "must be above 0" in str(caught.value)
    assert "Constraint" not in str(caught.value)
