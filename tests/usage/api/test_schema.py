from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.core.management import call_command
from django.test import Client

from ratelimits.usage.api.serializers import UsagePage
from tests.support.usage.traffic import flow
from tests.usage.api.test_usage import ask, spend

pytestmark = pytest.mark.django_db(transaction=True)


def schema(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/api/schema/", headers={"Accept": "application/json"}).json()
    return found


def test_the_schema_is_made_without_warnings(tmp_path: Any) -> None:
    call_command("spectacular", fail_on_warn=True, validate=True, file=str(tmp_path / "schema.yaml"))


def test_the_schema_describes_the_usage_endpoint(customer: Callable[..., Client]) -> None:
    described = schema(customer())["paths"]["/usage/"]["get"]
    assert {one["name"] for one in described["parameters"]} - {"format"} == {
        *("window", "account", "key", "meter", "from", "to", "timezone", "page_size", "cursor")
    }
    assert described["responses"].keys() == {"200", "400", "403", "429"}
    assert "Return usage by windows of time" in described["description"]


def test_the_schema_says_that_nobody_knows_what_is_included_only_without_bills(
    customer: Callable[..., Client], request: pytest.FixtureRequest
) -> None:
    numbers = {"included", "remaining", "overage"}

    def nullable() -> set[str]:
        described = schema(customer())["components"]["schemas"]["IncludedUsage"]["properties"]
        return {name for name, about in described.items() if about.get("nullable") or "null" in about.get("type", ())}

    assert nullable() == set()
    request.getfixturevalue("no_bills")
    assert nullable() == numbers


def test_an_answer_is_what_the_schema_says(customer: Callable[..., Client]) -> None:
    client = customer()
    spend("2026-11-02T08:00")
    flow()
    answer = ask(client)
    described: Any = UsagePage(data=answer)
    assert described.fields.keys() == answer.keys()
    assert described.fields["results"].child.fields.keys() == answer["results"][0].keys()
    assert described.fields["quota"].fields.keys() == answer["quota"].keys()
