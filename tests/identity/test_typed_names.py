"""Test that staff can give an override, a block and a plan to anybody who is counted and billed, whatever the name."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import pytest
import redis
from django.apps import apps
from django.contrib.admin import site
from django.contrib.auth.models import AnonymousUser, User
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.test import Client, RequestFactory
from django.utils.functional import SimpleLazyObject
from hypothesis import HealthCheck, example, given, settings

from ratelimits.billing.reports.exports import FORMATS
from ratelimits.files import neutral
from ratelimits.identity import Identity, identify, name_of
from ratelimits.models import Access, Account, KeyOverride, Plan, PlanMembership
from ratelimits.outbound import permits
from ratelimits.quota import checking
from ratelimits.row_files.comparing import LineState
from ratelimits.row_files.tables import TABLES, lines, read
from ratelimits.status.keys import known_keys
from ratelimits.status.operating import NO_ACCOUNT, identity_of, reset
from ratelimits.usage.models import KeyTotal, Line
from tests.identity.conftest import Team, request
from tests.row_files.test_importing import imported
from tests.support.reports.invoices import close, spend
from tests.support.reports.priced import written
from tests.support.rows import rule
from tests.support.usage.traffic import flow
from tests.test_naming import TEXTS

pytestmark = pytest.mark.django_db(transaction=True)

#: The window of a test ends long after the test.
HOUR: dict[str, Any] = {"period": 3600, "window_start": "first_hit"}
#: Texts that had a name that nobody could type.
TEXTS_OF_OLD = [
    *("CN=Max Muster,OU=x", "a b", "a,b;c", "x user:5", "team/user:5", "a\nb", "a\x00b", "a\x85b", " a", "a ", "-"),
    *("\u2028", "\u200b", "\ud800", "=a", "~a", "=SUM(1)", "4, 5", "a  b", "50% user:5", "\u3000", "a\x7f"),
]

#: Those that are typed into whole pages: a plain one, and those with what HTTP and HTML have a meaning for.
ON_PAGES = ("CN=Max Muster,OU=x", "a b", "a\x00b", "\ud800", "50% user:5", "=SUM(1)")


def examples_of_old(test: Any) -> Any:
    """Let a property test begin with these texts."""
    return reduce(lambda decorated, text: example(text=text)(decorated), TEXTS_OF_OLD, test)


Hooks = Callable[..., None]
BASE = "/admin/ratelimits"
NO_CHANNELS = {"alert_channels-TOTAL_FORMS": "0", "alert_channels-INITIAL_FORMS": "0"}


def admitted(asked: Any, times: int) -> int:
    return sum(checking.check(identify(asked)).allowed for _ in range(times))


def typed(client: Client, page: str, **values: Any) -> None:
    """Save this row on its page."""
    answer = client.post(f"{BASE}/{page}/add/", values)
    assert answer.status_code == 302, answer.content.decode()
    # No page shows the messages, so they would grow with every answer.
    client.cookies.pop("messages", None)


def filled_in(staff: User) -> Callable[..., None]:
    """Return a function that saves a row as its page does, but with the form alone."""
    asked = RequestFactory().post("/")
    asked.user = staff

    def fill_in(page: str, **values: Any) -> None:
        kind = site.get_model_admin(apps.get_model("ratelimits", page))
        form = kind.get_form(asked)(values)
        assert form.is_valid(), form.errors
        form.save()

    return fill_in


def of_hooks(text: str) -> Any:
    """Return a request whose user, API key and account have this text."""
    asked: Any = request()
    asked.text = text
    return asked


def check_forms(typed: Callable[..., None], plan: Plan, text: str) -> None:
    """Type what a request of this text shows into each form, and see that the request finds it."""
    asked = of_hooks(text)
    who = identify(asked)
    assert admitted(asked, 2) == 1
    for key in (who.user, who.account):
        typed("keyoverride", key=key, rule="user" if key == who.user else "account", capacity=1000, mode="")
        assert KeyOverride.objects.filter(key=key).exists()
    assert admitted(asked, 2) == 2
    KeyOverride.objects.all().delete()
    typed("planmembership", key=who.api_key, plan=plan.pk)
    assert PlanMembership.objects.get().key == who.api_key
    assert admitted(asked, 2) == 2
    PlanMembership.objects.all().delete()
    typed("account", identifier=who.account_id, name="Acme", timezone="UTC", plan=plan.pk, **NO_CHANNELS)
    assert Account.objects.get().identifier == who.account_id
    assert admitted(asked, 2) == 2
    Account.objects.all().delete()
    for key in (who.user, who.api_key, who.account):
        typed("access", target=key, effect="block", status=403, reason="abuse", _confirmed="1")
        assert Access.objects.get().target == key
        assert admitted(asked, 1) == 0
        Access.objects.all().delete()


def text_of_request(request: Any) -> str | None:
    """Return the text; None for requests of the admin."""
    return getattr(request, "text", None)


@pytest.fixture
def plan(hooks: Hooks) -> Plan:
    """Let one request of each user and account pass, and many under a plan."""
    # An API key whose text is no secret is the row of a model.
    hooks(
        USER=text_of_request,
        API_KEY=lambda request: Team(pk=request.text) if text_of_request(request) else None,
        ACCOUNT=text_of_request,
    )
    made = Plan.objects.create(name="Pro", slug="pro")
    for name in ("user", "account"):
        rule(name, "fixed_window", **HOUR, capacity=1, key_kind=name)
        rule(name, "fixed_window", **HOUR, capacity=10_000, key_kind=name, plan=made)
    return made


@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(TEXTS)
@examples_of_old
def test_each_form_takes_the_name_as_it_is_shown(
    admin_client: Client, admin_user: User, plan: Plan, redis_client: redis.Redis, text: str
) -> None:
    """Use the forms of the pages. All that is between a page and its form is the same for every name."""
    for model in (KeyOverride, PlanMembership, Access, Account):
        if model.objects.exists():  # of an example that failed
            model.objects.all().delete()
    redis_client.flushall()
    on_page = text in ON_PAGES
    check_forms(partial(typed, admin_client) if on_page else filled_in(admin_user), plan, text)


def test_what_was_counted_is_found_by_the_name_that_the_ledger_shows(
    admin_client: Client, plan: Plan, fsync_at_once: None
) -> None:
    for text in TEXTS_OF_OLD:
        assert admitted(of_hooks(text), 1) == 1
    flow()
    for text in TEXTS_OF_OLD:
        who = identify(of_hooks(text))
        (line,) = Line.objects.filter(account=who.account_id, key=who.api_key)
        for key in (line.key, f"account:{line.account}", str(who.user)):
            page = admin_client.get(f"{BASE}/inspect/", {"q": key, "account": line.account}).context
            assert (page["key"], page.get("problem", "")) == (key, "")
        printed = io.StringIO()
        call_command("ratelimits_key", "show", str(who.user), "--account", line.account, stdout=printed)
        assert printed.getvalue().startswith(f"account: {line.account}\n")
        reset(str(who.user), "user", "a test", account=line.account)
        found_lines = admin_client.get("/admin/ratelimits_usage/line/", {"q": f"{line.account} {line.key}"}).context
        listed = found_lines["cl"].result_list
        assert list(listed) == [line], ascii(text)
        if text.strip() == text and text.isprintable():
            found = {known.key for known in known_keys(text, {KeyTotal}).keys}
            assert f"account:{line.account}" in found, "people search for the text itself"


def test_files_of_rows_and_reports_have_the_name(fsync_at_once: None) -> None:
    plan = Plan.objects.create(name="Pro", slug="pro")
    rule()
    names = [str(name_of(text)) for text in TEXTS_OF_OLD]
    files: dict[Any, list[Any]] = {
        Account: [Account(identifier=name, plan=plan) for name in names],
        PlanMembership: [PlanMembership(key=f"user:{name}", plan=plan) for name in names],
        KeyOverride: [KeyOverride(key=f"account:{name}", rule="burst", capacity=5) for name in names],
    }
    for model, rows in files.items():
        model.objects.bulk_create(rows)
        table = TABLES[model]
        exported = io.StringIO()
        writer = csv.writer(exported)
        writer.writerow(table.columns)
        writer.writerows(lines(table, model.objects.all()))
        model.objects.all().delete()
        assert imported(read(exported.getvalue().encode(), table), model=model).counts == {LineState.NEW: len(names)}
        column = table.columns[0]
        assert sorted(model.objects.values_list(column, flat=True)) == sorted(getattr(row, column) for row in rows)
    for name in names:
        spend(name, "2026-11-10T12:00", 7)
    reports = close("2026-12-02")
    assert sorted(report.account for report in reports) == sorted(names)
    for report in reports:
        for form in FORMATS:
            assert written(report, form)
        (line,) = csv.DictReader(io.StringIO(written(report, "csv").decode()))
        assert line["account"] == neutral(report.account)


def test_an_account_called_hyphen_is_not_no_account(hooks: Hooks) -> None:
    hooks(ACCOUNT=lambda request: "-")
    assert identify(request("ada")).account == "account:=-"
    assert identity_of("user:ada", "=-") == Identity("user:ada", None, "account:=-")
    assert identity_of("user:ada", NO_ACCOUNT) == Identity("user:ada")


def test_rows_that_code_saves_apply(plan: Plan) -> None:
    """A project saves rows with the text that it knows. (A text that is a name of its own is meant as this name.)"""
    for text in TEXTS_OF_OLD:
        asked = of_hooks(text)
        assert admitted(asked, 2) == 1, ascii(text)
        block = Access.objects.create(target=f"user:{text}", reason="abuse")
        assert admitted(asked, 1) == 0, ascii(text)
        block.delete()
        payer = Account.objects.create(identifier=text, plan=plan)
        assert admitted(asked, 2) == 2, ascii(text)
        Account.objects.filter(pk=payer.pk).update(identifier=text, name="the same")
        assert admitted(asked, 2) == 2, ascii(text)
        payer.delete()
        assert admitted(asked, 1) == 0, ascii(text)
        KeyOverride.objects.create(key=f"user:{text}", rule="user", capacity=1000)
        KeyOverride.objects.create(key=f"account:{text}", rule="account", capacity=1000)
        assert admitted(asked, 2) == 2, ascii(text)


def test_calls_to_others_have_names_that_requests_can_have() -> None:
    with permits("mail", identity=Identity(user=f"user:{name_of('x user:5')}"), max_wait=0):
        pass
    for wrong, right in (
        (Identity(user="user:x user:5"), "user:=x%20user:5"),
        (Identity(account="account:-"), "account:=-"),
        (Identity(user="42"), "user:42"),
    ):
        with pytest.raises(ImproperlyConfigured, match=f"write '{right}'"):
            permits("mail", identity=wrong)


# Users who are accounts


class Proxy(User):
    class Meta:
        app_label = "tests"
        proxy = True


@pytest.mark.parametrize("length", [1, 250, 251, 252, 300])
@pytest.mark.parametrize("model", [None, "auth.User"])
def test_a_user_is_one_account_whoever_says_it(hooks: Hooks, model: str | None, length: int) -> None:
    pk: Any = "x" * length
    answers: list[Any] = [None, "", User(pk=pk), Proxy(pk=pk), SimpleLazyObject(lambda: User(pk=pk)), AnonymousUser()]
    found = set()
    for answer in answers:
        hooks(ACCOUNT=lambda request, answer=answer: answer, ACCOUNT_MODEL=model)
        found.add(identify(request(User(pk=pk))).account)
    assert len(found) == 1
    (account,) = found
    assert str(account).startswith("account:user:") is (model is None)


def test_a_user_whose_account_has_the_users_name_has_one_count(hooks: Hooks) -> None:
    """ACCOUNT can name another user, so the user's limits are in the user's own shard."""
    payers = {"own": None, "other": User(pk=2)}
    hooks(ACCOUNT=lambda request: payers[request.headers["X-Payer"]], ACCOUNT_MODEL="auth.User", SHARDS=64)
    rule("user", "fixed_window", **HOUR, capacity=2, key_kind="user")
    asked = [request(User(pk=1), **{"X-Payer": payer}) for payer in ("own", "other") * 4]
    assert sum(checking.check(identify(one)).allowed for one in asked) == 2
