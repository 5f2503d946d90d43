"""Test the shadow page: what rules in shadow mode would have refused, and the page that enforces one."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from ratelimits.identity import Identity
from ratelimits.models import KeyOverride, Rule
from ratelimits.quota.checking import check
from ratelimits.usage.models import KeyTotal, RuleTotal
from tests.admin.test_rules import text
from tests.support.below import SITE
from tests.support.rows import rule
from tests.support.usage.traffic import flow

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fsync_at_once")]

URL = f"{SITE}/admin/ratelimits_usage/shadow/"


def shadowed(name: str = "strict", **fields: Any) -> Rule:
    """Add a rule in shadow mode that would refuse the third request of a key."""
    return rule(name, capacity=2, rate="0.000001", **{"mode": "shadow", **fields})


def use(requests: int, user: int = 1) -> None:
    for _ in range(requests):
        assert check(Identity(f"user:{user}", account=f"account:{user}")).allowed


def user_with(client: Client, *permissions: str) -> Client:
    user = User.objects.create(username=f"user{User.objects.count()}", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client.force_login(user)
    return client


def confirmation(client: Client, url: str, **typed: str) -> dict[str, str]:
    """Return what the form of the page posts, with the values that a user types."""
    inputs = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', client.get(url).content.decode())
    return {**dict(inputs), **typed}


def test_it_says_what_each_rule_would_have_refused_and_whom(admin_client: Client) -> None:
    strict, _lax = shadowed(), shadowed("lax", scope="search")
    use(5)
    use(3, user=2)
    flow()
    response = admin_client.get(URL)
    page, html = text(response), response.content.decode()
    assert "The rule would have refused 4 requests of 2 keys in the last 24 hours." in page
    assert page.index("strict") < page.index("lax")
    assert "The rule would have refused nobody in the last 24 hours." in page
    assert re.search(
        rf'<a href="{SITE}/admin/ratelimits/inspect/\?q=user%3A1&amp;account=1">user:1</a></th><td>1</td><td>3<', html
    )
    assert html.count('<svg class="ratelimits-bars ratelimits-shadow"') == 1
    assert len(re.findall(r'<tr><th scope="row">\d\d:00</th>', html)) == 24
    assert f'<a class="button" href="{SITE}/admin/ratelimits/rule/{strict.pk}/enforce/">Enforce now</a>' in html
    assert (
        f'<a href="{SITE}/admin/ratelimits_usage/shadow/">Shadow-refused</a>'
        in admin_client.get("/admin/ratelimits/status/").content.decode()
    )


def test_a_rule_that_is_enforced_now_has_no_button(admin_client: Client) -> None:
    row = shadowed(mode="enforce")
    KeyOverride.objects.create(key="user:1", rule="strict", mode="shadow")
    use(3)
    flow()
    page = text(admin_client.get(URL))
    assert "The mode of the rule is now: enforce. The rule would have refused 1 request of 1 key" in page
    assert "Enforce now" not in page
    assert f"/admin/ratelimits/rule/{row.pk}/change/" in admin_client.get(URL).content.decode()


def test_without_shadow_rules_it_says_so(admin_client: Client) -> None:
    rule()
    assert "No rule is in shadow mode" in text(admin_client.get(URL))


def test_old_and_other_totals_do_not_count(admin_client: Client) -> None:
    row = shadowed()
    use(3)
    flow()
    RuleTotal.objects.filter(shadow_requests__gt=0).update(start=0)
    KeyTotal.objects.filter(shadow_requests__gt=0).update(start=0)
    page = text(admin_client.get(URL))
    assert "The rule would have refused nobody" in page
    row.delete()
    assert "No rule is in shadow mode" in text(admin_client.get(URL))


def test_the_number_of_queries_is_fixed(admin_client: Client) -> None:
    def queries() -> int:
        with CaptureQueriesContext(connection) as seen:
            admin_client.get(URL)
        return len(seen)

    shadowed()
    use(3)
    flow()
    queries()
    first = queries()
    for number in range(20):
        shadowed(f"more-{number}")
        use(4, user=number)
    flow()
    assert queries() == first


def test_enforcing_shows_whom_it_hits_and_asks_first(admin_client: Client) -> None:
    row = shadowed()
    use(5)
    use(1, user=2)
    flow()
    url = f"/admin/ratelimits/rule/{row.pk}/enforce/"
    page = text(admin_client.get(url))
    assert "The rule would have refused 3 requests of 1 key in the last 24 hours." in page
    assert "user:1 1 3" in page
    assert "From the next request on, the rule refuses requests above its limit." in page
    assert "1 of these keys is above the limit now." in page
    admin_client.post(url)
    row.refresh_from_db()
    assert row.mode == "shadow", "a POST that nobody confirmed changes nothing"
    response = admin_client.post(url, confirmation(admin_client, url, change_reason="OPS-17"), follow=True)
    assert response.redirect_chain == [(URL, 302)]
    assert "The mode of 1 rule is now enforce." in text(response)
    row.refresh_from_db()
    assert row.mode == "enforce"
    record = row.history.latest()
    assert (record.history_change_reason, record.history_user.username, record.version) == (
        "OPS-17",
        "admin",
        row.version,
    )
    assert not check(Identity("user:1", account="account:1")).allowed
    assert "The rule strict is already enforced." in text(admin_client.get(url, follow=True))


def test_an_edit_after_the_page_was_shown_is_shown_before_the_rule_is_enforced(admin_client: Client) -> None:
    row = shadowed()
    url = f"/admin/ratelimits/rule/{row.pk}/enforce/"
    seen = confirmation(admin_client, url)
    row.capacity = 1
    row.save()
    for values in (seen, {"_confirmed": "1"}, {**seen, "version": "x"}, {**seen, "version": "9" * 30}):
        page = text(admin_client.post(url, values, follow=True))
        assert "The rule was edited after the page was shown. Look at the rule again." in page
        assert "Enforce strict" in page
        row.refresh_from_db()
        assert row.mode == "shadow"
        assert row.history.count() == 2
    admin_client.post(url, confirmation(admin_client, url))
    row.refresh_from_db()
    assert (row.mode, row.capacity) == ("enforce", 1)


def test_enforcing_a_rule_that_would_refuse_everyone_warns(admin_client: Client) -> None:
    row = shadowed()
    use(5)
    flow()
    response = admin_client.get(f"/admin/ratelimits/rule/{row.pk}/enforce/")
    assert re.search(r'<p class="errornote">[^<]*Everyone would be refused', response.content.decode())


def test_a_rule_that_cannot_be_read_or_found(admin_client: Client) -> None:
    row = shadowed()
    Rule.objects.filter(pk=row.pk).update(key_kind="caller", initial="none")
    assert "not in force" in text(admin_client.get(f"/admin/ratelimits/rule/{row.pk}/enforce/"))
    assert "not in force" in text(admin_client.get(URL))
    for number in ("x", "99999"):
        assert admin_client.get(f"/admin/ratelimits/rule/{number}/enforce/").status_code == 404


def test_parts_of_the_page_are_for_those_who_may_see_them(client: Client) -> None:
    row = shadowed()
    use(5)
    flow()
    html = user_with(client, "view_shadow").get(URL).content.decode()
    assert "user:1" in html
    assert "/rule/" not in html
    assert "/inspect/" not in html
    assert "Enforce now" not in html
    assert (
        user_with(client, "view_rule", "view_shadow").get(f"/admin/ratelimits/rule/{row.pk}/enforce/").status_code
        == 403
    )
    assert "Enforce now" not in client.get(URL).content.decode()
    enforcing = text(user_with(client, "change_rule").get(f"/admin/ratelimits/rule/{row.pk}/enforce/"))
    assert "3 requests of 1 key" in enforcing
    assert "user:1" not in enforcing
    assert client.get(URL).status_code == 403
    url = f"/admin/ratelimits/rule/{row.pk}/enforce/"
    response = client.post(url, confirmation(client, url))
    assert response["Location"] == f"{SITE}/admin/ratelimits/rule/"
