"""Test documents in a project that has no prices."""

from __future__ import annotations

import json

import pytest

from ratelimits import as_code
from ratelimits.billing.models import PlanPrice
from ratelimits.models import ConfigVersion, Plan, PlanInclusion

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("no_bills")]


def test_a_price_is_refused() -> None:
    document = {"plans": {"pro": {"currency": "EUR", "prices": {"requests": {"unit_price": "1"}}}}}
    with pytest.raises(as_code.RefusedError, match=r"prices need the app that bills: add 'ratelimits\.billing' to"):
        as_code.parse(json.dumps(document).encode())


def test_prices_of_before_are_neither_written_nor_deleted() -> None:
    plan = Plan.objects.create(name="Pro", slug="pro", currency="EUR")
    PlanInclusion.objects.create(plan=plan, meter="tokens", quantity=5)
    PlanPrice.objects.create(plan=plan, meter="tokens", unit_price=1)
    document = as_code.dump("default")
    assert document["plans"] == {"pro": {"name": "Pro", "includes": {"tokens": 5}, "currency": "EUR"}}
    version = ConfigVersion.read("default")
    assert as_code.load(document, "default", delete=True) == []
    assert ConfigVersion.read("default") == version
    document["plans"]["pro"]["includes"] = {"pages": 7}
    assert as_code.load(document, "default", delete=True) == ["changed plan pro"]
    assert list(PlanPrice.objects.values_list("meter", flat=True)) == ["tokens"]
