"""Test values that no browser sends: an empty, an absent or a foreign value is a form error or is saved as a valid row.

Such values come from scripts that post to the admin. Without these tests, an error of the database would show as a
response with status 500.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from django import forms
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import models, transaction
from django.test import Client

from ratelimits.billing.models import Adjustment, PlanPrice
from ratelimits.models import Access, Account, KeyOverride, Plan, PlanInclusion, PlanMembership, Rule
from ratelimits.usage.models import AlertChannel, KeyTotal
from ratelimits.usage.models.totals import DAY, SUMS, newest_days
from tests.admin.test_operate import BLOCK, GRANT, RESET, TYPED, text
from tests.admin.test_prices import price
from tests.admin.test_rules import BUCKET
from tests.support.rows import rule

pytestmark = pytest.mark.django_db

BASE = "/admin/ratelimits"
FOREIGN = ("no-such-value", "9" * 400, "-1e999", "\0")
CHOSEN_OR_COUNTED = (forms.ChoiceField, forms.ModelChoiceField, forms.IntegerField, forms.DecimalField)
CONFIRMED = {"_confirmed": "1"}
PARTS = {f"{name}-INITIAL_FORMS": "0" for name in ("inclusions", "prices")}
PARTS |= {f"{name}-TOTAL_FORMS": "1" for name in ("inclusions", "prices")}
PARTS |= {"inclusions-0-meter": "requests", "inclusions-0-quantity": "5"}
MEMBER = {"key": "user:1", "plan": "{plan}", "valid_until_0": "2099-01-01", "valid_until_1": "00:00:00"}
ACCOUNT = {"identifier": "acme", "name": "", "plan": "{plan}", "timezone": "UTC", "billing_anchor": ""}
CHANNEL = {"account": "{account}", "email": "a@example.com", "webhook_url": "", "active": "on"}
#: The values of a valid form for each page. `{plan}` and the like stand for the primary key of a row.
PAGES: dict[str, dict[str, str]] = {
    f"{BASE}/rule/add/": {**BUCKET, "name": "second"},
    f"{BASE}/rule/{{rule}}/change/": {**BUCKET, "algorithm": "sliding_window", "sub_windows": "5", "max_wait": ""},
    f"{BASE}/rule/trial/": BUCKET,
    f"{BASE}/rule/preview/": BUCKET,
    f"{BASE}/rule/yesterday/": BUCKET,
    f"{BASE}/keyoverride/add/": {"key": "user:1", "rule": "burst", "capacity": "5", "mode": "", "reason": "asked"},
    f"{BASE}/planmembership/add/": MEMBER,
    f"{BASE}/plan/add/": {"name": "Basic", "slug": "basic", "currency": "EUR", **PARTS, **price(unit_price="0.10")},
    f"{BASE}/account/add/": ACCOUNT,
    f"{BASE}/account/{{account}}/change/": ACCOUNT,
    "/admin/ratelimits_usage/alertchannel/add/": {**CHANNEL, "secret": "whsec_" + "QUJD" * 8},
    "/admin/ratelimits_billing/adjustment/add/": {
        "account": "other",
        "period_start_0": "2026-10-01",
        "period_start_1": "00:00:00",
        "meter": "requests",
        "quantity": "-20",
        "reason": "goodwill",
    },
    f"{BASE}/planmembership/import/?file={{file}}": {"good_only": "on", "change_reason": "asked"},
    "/admin/ratelimits_billing/report/force/": {"customer": "acme", "start": "0", "reason": "asked"},
    BLOCK: {**TYPED[BLOCK], **CONFIRMED},
    RESET: {**TYPED[RESET], **CONFIRMED},
    GRANT: {**TYPED[GRANT], **CONFIRMED},
}
#: The models whose rows these pages save.
SAVED: tuple[type[models.Model], ...] = (
    *(Rule, KeyOverride, PlanMembership, Plan, PlanInclusion, PlanPrice, Account, AlertChannel, Adjustment, Access),
)


@pytest.fixture
def pks(admin_client: Client) -> dict[str, Any]:
    """Return the primary keys of the rows that the forms choose, and of an uploaded file."""
    subject = {"account": "1", "key": "user:1", "rule": 0, "meter": "requests"}
    KeyTotal.objects.create(span=DAY, start=newest_days(time.time(), 1)[0], **subject, **dict.fromkeys(SUMS, 1))
    rows = {
        "rule": rule(key_kind="user"),
        "plan": Plan.objects.create(name="Pro", slug="pro"),
        "account": Account.objects.create(identifier="other"),
    }
    file = SimpleUploadedFile("members.csv", b"key,plan\nuser:7,pro\nuser:8,no-such-plan\n")
    uploaded = admin_client.post(f"{BASE}/planmembership/import/", {"file": file})
    return {**{name: row.pk for name, row in rows.items()}, "file": uploaded["Location"].rpartition("=")[2]}


def names_of_inputs(page: str) -> set[str]:
    """Return the names of all inputs of a page's form, without those of Django's own buttons and form counts."""
    names = re.findall(r'<(?:input|select|textarea)\b[^>]*?\sname="([^"]+)"', page)
    own = ("_", "csrf")
    return {name for name in names if not name.startswith(own) and "__prefix__" not in name and "_FORMS" not in name}


def fields_of_forms(context: Any) -> Iterator[tuple[str, forms.Field, forms.BaseForm]]:
    """Yield each field of the forms in a page's context, with the name of its input and its form."""
    inlines = [form for inline in context.get("inline_admin_formsets") or () for form in inline.formset.forms]
    main = context["adminform"].form if "adminform" in context else context.get("form")
    for form in (*([main] if isinstance(main, forms.BaseForm) else []), *inlines):
        for name, field in form.fields.items():
            yield form.add_prefix(name), field, form


def post(client: Client, url: str, values: dict[str, str]) -> tuple[Any, str]:
    """Post a form, and undo what it has changed. Return the response, and why a saved row is not valid."""
    wrong = ""
    # A period is closed in a transaction of its own. It cannot be nested, and here no period is open.
    with nullcontext() if url.endswith("force/") else transaction.atomic():
        response = client.post(url, values)
        for row in (row for model in SAVED for row in model._default_manager.all()):
            try:
                row.full_clean()
            except forms.ValidationError as error:
                wrong = f"{row}: {error}"
        if not url.endswith("force/"):
            transaction.set_rollback(True)
    return response, wrong


@pytest.mark.parametrize("page", PAGES)
def test_any_value_of_any_field_is_saved_as_a_valid_row_or_refused_with_a_message(
    admin_client: Client, pks: dict[str, Any], page: str, long_run: bool
) -> None:
    url, typed = page.format_map(pks), {name: text.format_map(pks) for name, text in PAGES[page].items()}
    if "file=" in url:
        shown = admin_client.get(url).content.decode()
        typed |= dict(re.findall(r'<input type="hidden" name="(digest|version)" value="([^"]*)"', shown))
    shown_page = admin_client.get(url, typed if url in (RESET, GRANT) else {})
    names = typed.keys() | names_of_inputs(shown_page.content.decode())
    names = {name for name in names if name != "_confirmed" and "_FORMS" not in name}
    if "rule/" not in page or page.endswith(("add/", "change/")):
        response, wrong = post(admin_client, url, typed)
        assert response.status_code == (200 if "adjustment" in page else 302), f"{wrong} {text(response)}"
    every_value = (None, "", *FOREIGN)
    for foreign in FOREIGN:
        response, wrong = post(admin_client, url, {**typed, **dict.fromkeys(names, foreign)})
        assert response.status_code in (200, 302), foreign
        assert not wrong, foreign
    for number, name in enumerate(sorted(names)):
        if not long_run and number % 4 != [*PAGES].index(page) % 4:
            continue
        without = {other: text for other, text in typed.items() if other != name}
        # The sample tries one value with each fourth field. A page takes up to a third of a second.
        for value in every_value if long_run else (every_value[number // 4 % 6],):
            values = without if value is None else {**without, name: value}
            response, wrong = post(admin_client, url, values)
            assert response.status_code in (200, 302), (name, value)
            assert not wrong, (name, value)
            if value in FOREIGN and response.context is not None:
                chosen = [form for own, field, form in fields_of_forms(response.context)
                          if own == name and isinstance(field, CHOSEN_OR_COUNTED)]  # fmt: skip
                said = list(response.context["messages"])
                assert all(form.errors or said for form in chosen), (name, value)


@pytest.mark.parametrize("name", ["limit", "key_kind", "scope"])
@pytest.mark.parametrize("value", [None, "", *FOREIGN])
def test_the_short_form_that_tries_a_limit_refuses_any_other_value(
    admin_client: Client, name: str, value: str | None
) -> None:
    values = {"limit": "50 a minute", "key_kind": "caller", "scope": "*", name: value}
    given = {name: text for name, text in values.items() if text is not None}
    assert admin_client.get(f"{BASE}/rule/yesterday/", given).status_code == 200


def test_an_empty_choice_of_a_rule_is_an_error_and_an_absent_one_keeps_its_value(admin_client: Client) -> None:
    row = rule(key_kind="api_key", refusal_status=402, callers="anonymous")
    url = f"{BASE}/rule/{row.pk}/change/"
    for name in ("refusal_status", "callers"):
        refused = admin_client.post(url, {**BUCKET, name: ""})
        assert "This field is required." in refused.context["adminform"].form.errors[name]
    without = {name: text for name, text in BUCKET.items() if name not in ("refusal_status", "callers")}
    assert admin_client.post(url, {**without, "key_kind": "ip"}).status_code == 302
    row.refresh_from_db()
    assert (row.refusal_status, row.callers, row.key_kind) == (402, "anonymous", "ip")
