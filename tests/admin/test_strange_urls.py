"""Test pages of the admin whose URL has a strange id or parameter: they answer, and never with a server error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from django.contrib import admin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.auth.models import User
from django.test import Client, RequestFactory
from django.urls import get_resolver, reverse
from django.utils import timezone

from ratelimits.models import Access, Account, KeyOverride, Plan, PlanMembership
from ratelimits.routers import is_own
from ratelimits.usage.models import ArchivedRange, Batch, DurabilityGap, QuarantinedBatch, ShardState
from tests.support.rows import rule

pytestmark = pytest.mark.django_db

#: Ids that no row has, or that are no ids.
IDS = ("0", "abc", str(2**63), "9" * 5000, "٣", "\0", "_5F")
MODELS = [model for model in admin.site._registry if is_own(model._meta.app_label)]


@pytest.fixture
def _rows() -> None:
    plan = Plan.objects.create(name="Pro", slug="pro")
    row = rule(plan=plan)
    rule("other")
    KeyOverride.objects.create(key="user:1", rule=row.name, capacity=1)
    PlanMembership.objects.create(key="user:1", plan=plan)
    Account.objects.create(identifier="acme", plan=plan)
    Access.objects.create(target="user:7", effect="block")
    for shard in (0, 7):
        ShardState.objects.create(shard=shard, position=1)
    ArchivedRange.objects.create(**_filled(ArchivedRange))
    Batch.objects.create(**_filled(Batch))
    DurabilityGap.objects.create(**_filled(DurabilityGap))
    QuarantinedBatch.objects.create(**_filled(QuarantinedBatch))


def _filled(model: Any) -> dict[str, Any]:
    """Return a value for each column that needs one."""
    values: dict[str, Any] = {}
    for field in model._meta.concrete_fields:
        if not (field.primary_key or field.null or field.has_default() or field.blank):
            kind = field.get_internal_type()
            values[field.name] = {"DateTimeField": timezone.now(), "JSONField": {}}.get(kind, 1)
    return values


def lists() -> Iterator[str]:
    for model in MODELS:
        yield reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist")


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize("url", [*lists()])
def test_a_list_shows_its_filters_with_counts(admin_client: Client, url: str) -> None:
    for query in ("_facets=True", "_facets=x&q=a", "_facets=True&o=1", "_facets=True&p=9" + "9" * 30):
        assert admin_client.get(f"{url}?{query}").status_code in (200, 302), query


def pages() -> list[str]:
    """Return the name of each page of the admin whose URL has an id of a row."""
    names = set()
    for resolver in get_resolver().url_patterns:
        if getattr(resolver, "namespace", None) == "admin":
            for inner in getattr(resolver, "url_patterns", []):
                for pattern in getattr(inner, "url_patterns", [inner]):
                    if (pattern.name or "").startswith("ratelimits_") and pattern.pattern.regex.groups:
                        names.add(pattern.name)
    return sorted(names)


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize("name", pages())
def test_a_page_of_a_row_that_is_not_there_is_not_found(admin_client: Client, name: str) -> None:
    patterns = get_resolver().reverse_dict  # fills the cache of the resolver
    assert patterns is not None
    possible = get_resolver().namespace_dict["admin"][1].reverse_dict.getlist(name)[0]
    route, arguments = possible[0][0]
    prefix = reverse("admin:index")
    for one in IDS:
        # Each argument takes the strange id once, while the others have an id of a row that is there.
        for strange in arguments:
            values = {argument: quote(one if argument == strange else "1", safe="") for argument in arguments}
            values |= {"table": "rule"} if "table" in arguments and strange != "table" else {}
            for method in (admin_client.get, admin_client.post):
                answer = method(prefix + route % values)
                assert answer.status_code in (200, 302, 400, 403, 404, 405), (one, strange, method)


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize("model", MODELS)
def test_an_action_on_a_strange_id_changes_nothing(admin_client: Client, model: Any) -> None:
    url = reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist")
    request = RequestFactory().get(url)
    request.user = User.objects.get()
    for action in admin.site._registry[model].get_actions(request):
        for one in IDS:
            answer = admin_client.post(url, {"action": action, ACTION_CHECKBOX_NAME: [one]})
            assert answer.status_code in (200, 302, 404), (action, one)


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize("model", MODELS)
def test_a_list_with_a_strange_filter_answers(admin_client: Client, model: Any) -> None:
    url = reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist")
    names = ["q", "id", "id__exact", "pk", "o", "p", "all", "e", "unknown"]
    filters: Any = admin.site._registry[model].list_filter
    for chosen in filters:
        if isinstance(chosen, str):
            field = model._meta.get_field(chosen)
            names += [f"{chosen}__id__exact" if field.is_relation else f"{chosen}__exact", f"{chosen}__isnull"]
        elif isinstance(chosen, tuple):
            names.append(f"{chosen[0]}__isempty")
        else:
            names.append(chosen.parameter_name)
    for name in names:
        for one in IDS[1:4]:
            answer = admin_client.get(url, {name: one, "_facets": "True"})
            assert answer.status_code in (200, 302, 400, 404), (name, one)
