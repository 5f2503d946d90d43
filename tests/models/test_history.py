from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

import pytest
from django.apps import apps
from django.core.management.commands.shell import Command
from django.utils.module_loading import import_string

from ratelimits.billing.models import PlanPrice
from ratelimits.models import Account, PlanMembership, Rule
from ratelimits.models.accounts import plan_parts
from ratelimits.models.versioned import versioned_models
from tests.support.own_apps import own_models


def test_each_model_is_found_where_it_says() -> None:
    models = own_models()
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


@contextmanager
def proxy_of(model: Any) -> Iterator[Any]:
    """Let a project have a proxy of a model."""
    meta = type("Meta", (), {"proxy": True, "app_label": "auth"})
    proxy: Any = type(f"My{model.__name__}", (model,), {"__module__": __name__, "Meta": meta})
    try:
        yield proxy
    finally:
        del apps.all_models["auth"][proxy._meta.model_name]
        apps.clear_cache()


@pytest.mark.parametrize("model", [Account, PlanPrice])
def test_a_proxy_of_a_project_is_no_table_of_its_own(model: Any) -> None:
    tables, parts = versioned_models(), plan_parts()
    with proxy_of(model) as proxy:
        assert proxy in apps.get_models()
        assert (versioned_models(), plan_parts()) == (tables, parts)
    assert proxy not in apps.get_models()
