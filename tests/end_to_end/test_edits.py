from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.test import Client
from django.urls import reverse

from project.models import ApiKey
from ratelimits.models import Rule
from tests.end_to_end.conftest import Asker


def form_of(page: Any) -> dict[str, Any]:
    """What a browser would send back of an admin page's form, unchanged."""
    forms = [page.context["adminform"].form]
    for inline in page.context["inline_admin_formsets"]:
        forms += [inline.formset.management_form, *inline.formset.forms]
    fields = {field.html_name: field.value() for form in forms for field in form}
    return {name: value for name, value in fields.items() if value is not None and value is not False}


@pytest.mark.django_db(transaction=True)
def test_an_edit_in_the_admin_holds_for_the_very_next_request_of_every_other_process(
    askers: Callable[[int], list[Asker]], issue_key: Callable[[str], tuple[ApiKey, str]]
) -> None:
    rule = Rule.objects.create(
        name="burst", key_kind="api_key", algorithm="token_bucket", capacity=1_000, rate=1, period=86_400
    )
    _, secret = issue_key("acme")
    admin = Client()
    admin.force_login(get_user_model().objects.create_superuser(username="staff"))
    others = askers(3)
    for other in others:
        other.ask(secret)
        assert '"burst";q=1000;' in other.answer()["headers"]["RateLimit-Policy"]

    address = reverse("admin:ratelimits_rule_change", args=[rule.pk])
    for edit in range(100):
        capacity = 1_001 + edit
        saved = admin.post(address, {**form_of(admin.get(address)), "capacity": capacity})
        assert saved.status_code == 302, saved.context["errors"]
        for other in others:
            other.ask(secret)
        policies = [other.answer()["headers"]["RateLimit-Policy"] for other in others]
        assert [policy.split(";")[1] for policy in policies] == [f"q={capacity}"] * 3, f"edit {edit}"
