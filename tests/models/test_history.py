from __future__ import annotations

from io import StringIO

from django.apps import apps
from django.core.management.commands.shell import Command
from django.utils.module_loading import import_string

from ratelimits.models import PlanMembership, Rule


def test_each_model_is_found_where_it_says() -> None:
    models = list(apps.get_app_config("ratelimits").get_models())
    assert Rule.history.model in models
    for model in models:
        assert import_string(f"{model.__module__}.{model.__name__}") is model


def test_the_shell_imports_each_model() -> None:
    said = StringIO()
    names = Command(stdout=said).get_namespace(verbosity=2)
    assert "could not be imported" not in said.getvalue()
    assert {"Rule", "HistoricalRule"} <= names.keys()


def test_all_accesses_to_a_history_share_one_class_of_managers() -> None:
    assert type(Rule.history) is type(Rule.history)
    assert Rule.history.model is not PlanMembership.history.model
