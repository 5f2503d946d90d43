from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.test import Client
from django.urls import reverse

from project.models import ApiKey
from ratelimits.models import Rule
from tests.support.eventually import until
from tests.support.siblings import Sibling


def form_of(page: Any) -> dict[str, Any]:
    """Return what a browser would send if nobody changed the form of an admin page."""
    forms = [page.context["adminform"].form]
    for inline in page.context["inline_admin_formsets"]:
        forms += [inline.formset.management_form, *inline.formset.forms]
    fields = {field.html_name: field.value() for form in forms for field in form}
    return {name: value for name, value in fields.items() if value is not None and value is not False}


Edit = Callable[[int], None]


@pytest.fixture
def edit_capacity(transactional_db: None) -> Edit:
    """Save another capacity of the only rule, as staff do in the admin; return when the admin has answered."""
    rule = Rule.objects.create(
        name="burst", key_kind="api_key", algorithm="token_bucket", capacity=10_000, rate=1, period=86_400
    )
    admin = Client()
    admin.force_login(get_user_model().objects.create_superuser(username="staff"))
    address = reverse("admin:ratelimits_rule_change", args=[rule.pk])

    def edit(capacity: int) -> None:
        saved = admin.post(address, {**form_of(admin.get(address)), "capacity": capacity})
        assert saved.status_code == 302, saved.context["errors"]

    return edit


def capacities(answer: dict[str, Any]) -> list[tuple[float, int]]:
    """Return for each request when it began, and the capacity by which it was decided."""
    return [(begun, int(policy.split(";")[1].removeprefix("q="))) for begun, policy in answer["policies"]]


def test_an_edit_holds_for_the_very_next_request_of_every_other_process(
    edit_capacity: Edit,
    askers: Callable[[int], list[Sibling]],
    issue_key: Callable[[str], tuple[ApiKey, str]],
    long_run: bool,
) -> None:
    _, secret = issue_key("acme")
    others = askers(3)
    edits = 100 if long_run else 8
    for capacity in (10_000, *range(10_001, 10_001 + edits)):
        if capacity > 10_000:
            edit_capacity(capacity)
        for other in others:
            other.ask({"secret": secret, "times": 1})
        assert [capacities(other.answer())[0][1] for other in others] == [capacity] * 3


def test_no_request_begun_after_an_edit_is_decided_by_the_old_rule_while_others_are_under_way(
    edit_capacity: Edit,
    askers: Callable[[int], list[Sibling]],
    issue_key: Callable[[str], tuple[ApiKey, str]],
    long_run: bool,
) -> None:
    _, secret = issue_key("acme")
    requests, count = (500, 20) if long_run else (200, 8)
    others = askers(3)
    decided: list[tuple[float, int]] = []
    edits: list[tuple[float, int]] = []

    def seen() -> int:
        """Edit while requests are under way; return how many capacities decided them."""
        for other in others:
            other.ask({"secret": secret, "times": requests})
        for _ in range(count):
            edit_capacity(10_001 + len(edits))
            edits.append((time.monotonic(), 10_001 + len(edits)))
        decided.extend(pair for other in others for pair in capacities(other.answer()))
        return len({capacity for _, capacity in decided})

    until(lambda: seen() > 2, "edits that come while requests are under way")
    late = [
        (begun, capacity)
        for begun, capacity in decided
        if capacity < max((newest for saved, newest in edits if saved < begun), default=0)
    ]
    assert late == []
