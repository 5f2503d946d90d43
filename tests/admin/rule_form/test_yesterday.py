"""Test what a rule, as it is typed into its form, would have done with recorded requests."""

from __future__ import annotations

import time
from html import unescape
from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from ratelimits.identity import Identity
from ratelimits.models import Access, KeyOverride, Plan, PlanMembership
from ratelimits.quota.waiting import check_and_wait
from ratelimits.usage import recording
from ratelimits.usage.admin import recorded
from ratelimits.usage.models import RecordedRequest
from tests.admin.test_rules import BUCKET, RULES, text
from tests.support.rows import rule

pytestmark = pytest.mark.django_db

URL, TRIAL = reverse("admin:ratelimits_rule_yesterday"), reverse("admin:ratelimits_rule_trial")
SECOND = 1_000_000
#: A window that contains all requests of a test.
WINDOW = {
    **{name: BUCKET[name] for name in ("name", "scope", "meter", "mode", "on_failure")},
    "key_kind": "user",
    "algorithm": "fixed_window",
    "capacity": "2",
    "period": "86400",
    "window_start": "first_hit",
}


def on(settings: Any, **more: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "RECORD_SAMPLE": 1, **more}


def asked(
    user: int, times: int = 1, *, ago: int = 600, scope: str = "*", method: str = "GET", refused: int = 0, **more: Any
) -> None:
    """Write requests of a user, a second after each other, the first `ago` seconds ago. The first ones were refused."""
    identity, costs = Identity(f"user:{user}", **more.pop("keys", {})), {"requests": 1, **more}
    start = (int(time.time()) - ago) * SECOND
    recording.write_rows(
        [(start + number * SECOND, identity, scope, method, costs, number < refused) for number in range(times)]
    )


def tried(client: Client, row: Any = None, **typed: str) -> dict[str, Any]:
    """Return the rows of the page's first table, by name: the cells."""
    response = client.post(URL if row is None else f"{URL}?rule={row.pk}", {**WINDOW, **typed})
    assert response.status_code == 200
    assert "verdict" in response.context, text(response)
    compared = response.context["compared"]
    return {name: (saved, now) if compared else now for name, saved, now in response.context["rows"]}


def refused(client: Client, **typed: str) -> dict[str, str]:
    """Return how many requests of each key the typed rule would have refused."""
    response = client.post(URL, {**WINDOW, **typed})
    return {row.key: row.refused_by_typed for row, *_ in response.context.get("keys", ())}


def test_it_says_who_would_have_been_refused_and_how_often(admin_client: Client) -> None:
    asked(1, 5)
    asked(2, 3)
    asked(3, 1)
    page = admin_client.post(URL, WINDOW)
    assert "Yes: 2 of 3 keys would have been refused at least once. Requests recorded from" in text(page)
    assert "The typed rule would have refused 4 requests of 2 keys." in text(page)
    assert [(row.key, row.requests, row.refused_by_typed) for row, *_ in page.context["keys"]] == [
        ("user:1", "5", "3"),
        ("user:2", "3", "1"),
    ]
    assert tried(admin_client) == {
        "requests that the rule counts": "9",
        "keys": "3",
        "admitted, and so billed": "5 requests",
    }
    nobody = text(admin_client.post(URL, {**WINDOW, "capacity": "5"}))
    assert "No: none of 3 keys would have been refused." in nobody
    assert "would have refused nobody" in nobody
    asked(4, 3, keys={"account": "account:acme"})
    of_account = text(admin_client.post(URL, {**WINDOW, "key_kind": "account"}))
    assert "Yes: 1 of 1 account would have been refused at least once." in of_account
    assert "The typed rule would have refused 1 request of 1 account." in of_account


def test_the_time_of_the_recorded_requests_is_in_the_first_sentence(admin_client: Client) -> None:
    asked(1, 2, ago=1_200)
    first, last = RecordedRequest.objects.order_by("at")
    RecordedRequest.objects.filter(pk=last.pk).update(at=first.at + 120 * SECOND)
    start, end = (time.gmtime(first.at // SECOND + seconds) for seconds in (0, 120))
    shown_end = "%H:%M" if start.tm_mday == end.tm_mday else "%Y-%m-%d %H:%M"
    span = f"{time.strftime('%Y-%m-%d %H:%M', start)} to {time.strftime(shown_end, end)}"
    said = admin_client.post(URL, WINDOW).context["verdict"]
    assert said.startswith(f"Requests recorded from {span} UTC, 2 minutes. The typed rule")


def test_it_says_what_was_refused_at_the_time(admin_client: Client) -> None:
    asked(1, 5, refused=1)
    asked(2, 6, refused=6)
    asked(3, 2, refused=2)
    asked(4, 4, refused=2)
    page = admin_client.post(URL, WINDOW)
    said = "would have refused 9 requests of 3 keys. 5 of these requests were admitted at the time."
    assert said in text(page)
    assert page.context["changes"] == [("requests", "4", "5", "7"), ("keys", "1", "2", "4")]
    assert [
        (row.key, row.refused_by_typed, row.refused_too, row.newly_refused, row.admitted_now)
        for row, *_ in page.context["keys"]
    ] == [
        ("user:1", "3", "0", "3", "1"),
        ("user:4", "2", "0", "2", "2"),
        ("user:2", "4", "4", "0", "2"),
        ("user:3", "0", "0", "0", "2"),
    ]
    RecordedRequest.objects.update(refused=True)
    said = "would have refused 9 requests of 3 keys. All of these requests were also refused at the time."
    assert said in text(admin_client.post(URL, WINDOW))


def test_it_stands_beside_the_saved_rule(admin_client: Client) -> None:
    row = rule("burst", "fixed_window", key_kind="user", capacity=4, period=86_400, window_start="first_hit")
    asked(1, 5)
    found = tried(admin_client, row)
    assert found["refused requests"] == ("1", "3")
    assert found["admitted, and so billed"] == ("4 requests", "2 requests")
    row.refresh_from_db()
    assert row.capacity == 4
    assert f"{URL}?rule={row.pk}" in admin_client.get(f"{RULES}{row.pk}/change/").content.decode()


@pytest.mark.django_db(transaction=True)
def test_a_rule_in_force_is_replayed_as_it_decided(admin_client: Client, settings: Any) -> None:
    on(settings, DENY_CACHE_SECONDS=0)
    recording.clear()
    numbers = {"capacity": 3, "rate": "0.01", "period": 1}
    row = rule("burst", "token_bucket", key_kind="user", **numbers)
    allowed = [
        check_and_wait(Identity(f"user:{number % 3}"), "*", "GET", {"requests": 1}).allowed for number in range(20)
    ]
    recording.write()
    typed = {"algorithm": "token_bucket", **{name: str(value) for name, value in numbers.items()}}
    found = tried(admin_client, row, **typed)
    assert found["refused requests"] == (str(allowed.count(False)),) * 2


def test_scopes_methods_meters_and_costs_are_those_of_the_rule(admin_client: Client) -> None:
    asked(1, 3, scope="search", method="POST", tokens=40)
    asked(2, 3, scope="files", method="GET")
    assert refused(admin_client, scope="search") == {"user:1": "1"}
    assert refused(admin_client, scope="search:GET") == {}
    assert refused(admin_client, scope="files:GET") == {"user:2": "1"}
    assert refused(admin_client, meter="tokens", capacity="100") == {"user:1": "1"}
    assert tried(admin_client, meter="tokens", capacity="100")["admitted, and so billed"] == "80 tokens"


def test_plans_overrides_and_blocks_apply_as_they_are_now(admin_client: Client) -> None:
    for number in (1, 2, 3, 4):
        asked(number, 4)
    rule("burst", "fixed_window", key_kind="user", capacity=100, period=86_400)
    KeyOverride.objects.create(key="user:2", rule="burst", capacity=3)
    PlanMembership.objects.create(key="user:3", plan=Plan.objects.create(name="Pro", slug="pro"))
    rule("burst", "fixed_window", key_kind="user", capacity=1, period=86_400, plan=Plan.objects.get())
    Access.objects.create(target="user:4", effect="block", reason="x")
    assert refused(admin_client) == {"user:1": "2", "user:2": "1"}
    assert refused(admin_client, plan=str(Plan.objects.get().pk)) == {"user:3": "2"}


def test_a_rule_that_makes_requests_wait_says_how_long(admin_client: Client) -> None:
    asked(1, 1)
    RecordedRequest.objects.bulk_create([RecordedRequest(**row) for row in _copies(5)])
    queue = {"algorithm": "leaky_bucket_queue", "capacity": "10", "rate": "1", "period": "1", "max_wait": "3"}
    assert tried(admin_client, **queue)["longest wait"] == "3 seconds"


def _copies(count: int) -> list[dict[str, Any]]:
    (row,) = RecordedRequest.objects.values("at", "user", "scope", "costs")
    return [{**row}] * count


def test_the_modes_are_said(admin_client: Client) -> None:
    row = rule("burst", "fixed_window", key_kind="user", capacity=4, period=86_400, mode="off")
    asked(1, 5)
    page = text(admin_client.post(f"{URL}?rule={row.pk}", {**WINDOW, "mode": "shadow"}))
    assert "The typed rule is not enforced. It would refuse these requests only if its mode were enforce." in page
    assert "The saved rule is not enforced, so it has refused nobody." in page
    assert "would have refused 3 requests" in page


def test_without_recorded_requests_it_says_what_to_do(admin_client: Client, settings: Any) -> None:
    assert "Requests are not recorded. To record them, set" in text(admin_client.post(URL, WINDOW))
    on(settings)
    asked(1, ago=90_000)
    said = "Requests are recorded, but no request came in the last 24 hours, in any scope."
    assert said in text(admin_client.post(URL, {**WINDOW, "scope": "search"}))
    asked(1)
    asked(1, scope="files")
    for sample in (1, 0):
        on(settings, RECORD_SAMPLE=sample)
        page = text(admin_client.post(URL, {**WINDOW, "scope": "search:GET"}))
        assert "no request in the scope search was recorded. Scopes with requests: *, files." in page
        assert "Requests are not recorded" not in page
    page = text(admin_client.post(URL, {**WINDOW, "meter": "x"}))
    assert "The rule counts none of the recorded requests: look at its scope, meter" in page
    assert "Requests recorded from" in page


def test_a_limit_on_requests_at_once_cannot_be_replayed(admin_client: Client) -> None:
    asked(1)
    at_once = {**WINDOW, "algorithm": "concurrency"}
    assert "a limit on requests at once cannot be tried" in text(admin_client.post(URL, at_once))
    assert "Recorded requests" not in text(admin_client.post(TRIAL, at_once))


def test_what_limits_the_numbers_is_said(admin_client: Client, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on(settings, RECORD_SAMPLE=0.25)
    asked(1, 9)
    RecordedRequest.objects.filter(pk=RecordedRequest.objects.latest("pk").pk).update(left_out=3)
    page = text(admin_client.post(URL, WINDOW))
    assert "The rest of the last 24 hours has no recorded requests" in page
    assert "All requests recorded in the last 24 hours" not in page
    assert "At present, 25 % of the accounts" in page
    assert "3 more requests of this time could not be recorded." in page
    assert "it could have refused more" not in page
    assert "it could have refused more" in text(admin_client.post(URL, {**WINDOW, "key_kind": "global"}))
    on(settings, RECORD_SAMPLE=0)
    assert "The recorder is off now. These requests were recorded before." in text(admin_client.post(URL, WINDOW))
    monkeypatch.setattr(recorded, "MAX_REQUESTS", 4)
    assert tried(admin_client)["requests that the rule counts"] == "4"


def test_what_is_wrong_is_said(admin_client: Client) -> None:
    page = unescape(text(admin_client.post(URL, {**WINDOW, "capacity": "many"})))
    assert "Correct these errors first: Capacity: “many” is not a whole number" in page
    page = text(admin_client.post(TRIAL, {**WINDOW, "algorithm": "token_bucket", "rate": "5", "period": "soon"}))
    assert "Period: “soon” is not a length of time" in page


def test_the_capacity_is_the_typed_rate_if_it_is_empty(admin_client: Client) -> None:
    asked(1, 5)
    bucket = {"algorithm": "token_bucket", "capacity": "", "period": ""}
    assert tried(admin_client, **bucket, rate="3 a week")["admitted, and so billed"] == "3 requests"
    assert (
        tried(admin_client, **{**bucket, "capacity": "4"}, rate="3 a week")["admitted, and so billed"] == "4 requests"
    )
    page = admin_client.post(f"{RULES}add/", {**WINDOW, **bucket, "rate": "3 a week"})
    assert "capacity" in page.context["adminform"].form.errors, "a saved rule needs a typed capacity"


def test_a_limit_is_tried_without_the_form_of_a_rule(admin_client: Client) -> None:
    asked(1, 5)
    asked(2, 2, scope="search")
    page = admin_client.get(URL)
    assert "Which requests of the last 24 hours would a limit have refused?" in text(page)
    page = admin_client.get(URL, {"limit": "3 a minute", "key_kind": "caller", "scope": "*"})
    assert "would have refused 2 requests of 1 key." in text(page)
    assert "Would a limit have refused anyone in the last 24 hours?" in text(page)
    assert "For everyone." in text(page)
    assert "plans with a rule of the same name" not in text(page)
    assert (
        "/rule/add/?scope=%2A&key_kind=caller&meter=requests&algorithm=sliding_window&capacity=3&period=60"
        in unescape(page.content.decode())
    )
    page = admin_client.get(URL, {"limit": "1 per day", "key_kind": "global", "scope": "search"})
    assert "would have refused 1 request of 1 key." in text(page)
    for values, said in (
        ({"limit": "", "key_kind": "caller", "scope": "*"}, "This field is required."),
        *(
            (
                {"limit": limit, "key_kind": "caller", "scope": "*"},
                "50/s, 50/m, 50/h, 50/d, 50/week, 50/5min or 50 a minute",
            )
            for limit in ("50", "50/mo", "50 a minute per caller", "many a minute", "1000 a month")
        ),
        ({"limit": "5/s", "key_kind": "x", "scope": "*"}, "is not one of the available choices"),
    ):
        assert said in text(admin_client.get(URL, values)), values


def test_keys_are_for_those_who_may_view_ledger_lines(client: Client, django_user_model: Any) -> None:
    asked(1, 5, keys={"address": "ip:203.0.113.9"})
    user = django_user_model.objects.create_user("editor", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename="change_rule"))
    client.force_login(user)
    for kind, key in (("user", "user:1"), ("ip", "ip:203.0.113.9")):
        said = text(client.post(URL, {**WINDOW, "key_kind": kind}))
        assert "would have refused 3 requests of 1 key." in said
        assert key not in said
    assert "203.0.113.9" not in client.post(f"{TRIAL}?fragment=1", {**WINDOW, "key_kind": "ip"}).content.decode()
    user.user_permissions.add(Permission.objects.get(codename="view_line"))
    page = client.post(URL, WINDOW)
    assert "user:1" in text(page)
    assert "/inspect/" not in page.content.decode()
    user.user_permissions.add(Permission.objects.get(codename="view_inspect"))
    assert "/admin/ratelimits/inspect/?q=user%3A1" in client.post(URL, WINDOW).content.decode()


def test_a_saved_rule_is_for_those_who_may_view_it(client: Client, django_user_model: Any) -> None:
    row = rule("burst", "fixed_window", key_kind="user", capacity=4, period=86_400, window_start="first_hit")
    asked(1, 5)
    user = django_user_model.objects.create_user("author", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename="add_rule"))
    client.force_login(user)
    assert tried(client, row, name="other")["admitted, and so billed"] == "2 requests"
    user.user_permissions.add(Permission.objects.get(codename="view_rule"))
    assert tried(client, row, name="other")["refused requests"] == ("1", "3")


def test_without_redis_it_says_so(admin_client: Client, settings: Any) -> None:
    asked(1)
    away = {**settings.CACHES["ratelimits"], "LOCATION": "redis://127.0.0.1:1/0"}
    settings.CACHES = {**settings.CACHES, "ratelimits": away}
    assert "Redis or the database does not answer" in text(admin_client.post(URL, WINDOW))


def test_the_number_of_queries_is_fixed_and_nothing_stays_in_redis(admin_client: Client, redis_client: Any) -> None:
    def queries() -> int:
        with CaptureQueriesContext(connection) as seen:
            admin_client.post(URL, WINDOW)
        return len(seen)

    asked(1)
    queries()
    first = queries()
    for number in range(100):
        asked(number, 3)
    assert queries() == first
    assert redis_client.keys("*simulate*") == []


def test_the_chart_shows_the_newest_recorded_hour(admin_client: Client) -> None:
    assert "Recorded requests" not in text(admin_client.post(TRIAL, WINDOW))
    asked(1, 40, ago=8_000)
    asked(1, 6, ago=600)
    page = text(admin_client.post(f"{TRIAL}?fragment=1", WINDOW))
    assert "Recorded requests: the newest 1 hour, 6 requests: 2 of 6 requests admitted." in page
