"""Test who may do what in the admin: every page and action, by its address, for every set of permissions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import django
import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import connection, models
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from ratelimits.admin.typed import moment_inputs
from ratelimits.billing.models import Adjustment, PlanPrice, Report
from ratelimits.models import (
    Access,
    Account,
    ConfigVersion,
    Inspect,
    KeyOverride,
    KeyReset,
    Plan,
    PlanInclusion,
    PlanMembership,
    Rule,
)
from ratelimits.routers import is_own
from ratelimits.usage.models import AlertChannel, QuarantinedBatch, ShardState
from tests.support.below import SITE
from tests.support.own_apps import own_models
from tests.support.rows import NEEDED

pytestmark = pytest.mark.django_db

#: Models whose pages ask for the permission to operate: tests/admin/test_operate.py.
OPERATED = {Access, KeyReset}
ADMINS = {
    model: page
    for model, page in admin.site._registry.items()
    if is_own(model._meta.app_label) and model not in OPERATED
}
#: Models that people edit. Workers write the other tables; adjustments can only be added.
EDITED = {Rule, Plan, PlanMembership, Account, KeyOverride, AlertChannel}
AUDITED = EDITED - {AlertChannel}
#: Models whose rows are imported and exported as files.
IN_FILES = {PlanMembership, Account, KeyOverride}
#: The pages that are about no single row.
OF_ALL_ROWS = {
    "changelist",
    "add",
    "preview",
    "trial",
    "yesterday",
    "download_month",
    "open",
    "force",
    "import",
    "export",
    "keys",
    "finalise",
    "accounts",
    "move",
}
_numbers = itertools.count(1)


# Rows to look at and to change


def filled(model: type[models.Model], **given: Any) -> Any:
    """Return a new row in which every required column has its own value."""
    number = next(_numbers)
    for field in model._meta.concrete_fields:
        needed = not (field.has_default() or field.null or field.blank or getattr(field, "auto_now_add", False))
        if field.name in given or not (needed or field.primary_key) or isinstance(field, models.BigAutoField):
            continue
        if isinstance(field, models.ForeignKey):
            given[field.name] = filled(field.related_model)
        elif isinstance(field, models.UUIDField):
            given[field.name] = f"00000000-0000-4000-8000-{number:012}"
        elif isinstance(field, models.DateTimeField):
            given[field.name] = timezone.now()
        elif isinstance(field, models.IntegerField):
            given[field.name] = number
        else:
            given[field.name] = f"x{number}"[: field.max_length]
    return model._default_manager.create(**given)


def row_of(model: type[models.Model]) -> Any:
    number = next(_numbers)
    if model is Rule:
        return filled(Rule, algorithm="token_bucket", initial="full", **NEEDED["token_bucket"])
    if model is KeyOverride:
        return filled(KeyOverride, key=f"user:{number}", rule=row_of(Rule).name, capacity=5)
    if model is PlanMembership:
        return filled(PlanMembership, key=f"user:{number}")
    if model is AlertChannel:
        return filled(AlertChannel, email="a@example.com")
    if model is QuarantinedBatch:
        return filled(QuarantinedBatch, shard=filled(ShardState).pk, name="3f9c:1", fields=[])
    if issubclass(model, ConfigVersion):  # the only row of its table
        return model.objects.get_or_create(pk=1)[0]
    if model is Adjustment:
        return filled(Adjustment, author=User.objects.create(username=f"author{number}"), quantity=1)
    return filled(model)


#: The values typed into the form of a new row, and into the form of an existing row.
def typed(model: type[models.Model]) -> dict[str, Any]:
    number = next(_numbers)
    inline = {f"{name}-{count}_FORMS": "0" for name in ("inclusions", "prices") for count in ("TOTAL", "INITIAL")}
    plan = {"plan": filled(Plan).pk}
    start = moment_inputs("period_start", datetime(2026, 11, 1, tzinfo=UTC))
    report = {**start, "meter": "requests", "reason": "goodwill"}
    seen = {"_effect_seen": "1", "_large_meant": "1"}
    forms: dict[Any, dict[str, Any]] = {
        Rule: {
            "name": f"typed{number}",
            "scope": "*",
            "key_kind": "caller",
            "meter": "requests",
            "mode": "enforce",
            "algorithm": "token_bucket",
            "capacity": "999",
            "rate": "5",
            "period": "1",
            "on_failure": "",
        },
        Plan: {"name": "Typed", "slug": f"typed{number}", **inline},
        PlanMembership: {"key": f"user:{number}", **plan},
        Account: {"identifier": f"typed{number}", "name": "Typed", "timezone": "UTC"},
        AlertChannel: {"email": "typed@example.com", "secret": "whsec_" + "QUJD" * 8},
        Adjustment: {"quantity": "-2", **report, **seen},
    }
    if model is KeyOverride:
        return {"key": f"user:{number}", "rule": row_of(Rule).name, "capacity": "77", "mode": ""}
    if model in (AlertChannel, Adjustment):
        account = filled(Account, identifier=f"payer{number}")
        forms[AlertChannel]["account"], forms[Adjustment]["account"] = account.pk, account.identifier
    return forms.get(model, {})


# Users and their permissions

Permissions = frozenset[str]
Test = Callable[[Permissions], bool]


def see(held: Permissions) -> bool:
    return not held.isdisjoint({"view", "change"})


def may(name: str) -> Test:
    return lambda held: name in held


def nobody(held: Permissions) -> bool:
    return False


def both(one: Test, other: Test) -> Test:
    return lambda held: one(held) and other(held)


def held_by_people(model: type[models.Model]) -> Iterator[Permissions]:
    """Return the sets of permissions: none, each one alone, each one together with "view", all."""
    every = [short(permission.codename) for permission in permissions_of(model)]
    assert "view" in every
    yield frozenset()
    for name in every:
        yield frozenset({name})
        if name != "view":
            yield frozenset({"view", name})
    yield frozenset(every)


def short(codename: str) -> str:
    """Return a permission's name without the name of its table; special permissions have no such name."""
    return codename.rpartition("_")[0] or codename


def permissions_of(model: type[models.Model]) -> models.QuerySet[Permission]:
    meta = model._meta
    own = Permission.objects.filter(content_type__app_label=meta.app_label, content_type__model=meta.model_name)
    # The floor of usage adds the action to accounts, so the permission is of a table of that floor.
    return own | Permission.objects.filter(codename="erase") if model is Account else own


#: One client for all users, because making a client reads all static files.
CLIENT = Client()


def client_with(model: type[models.Model], held: Permissions, *, staff: bool = True) -> Client:
    """Return a client whose user has these permissions of one table, and all permissions of the other tables."""
    return now_with(signed_in(model, staff=staff), model, held)


def signed_in(model: type[models.Model], *, staff: bool = True) -> User:
    """Sign a new user in, who has all permissions of the other tables."""
    user = User.objects.create(username=f"user{next(_numbers)}", is_staff=staff)
    others = (
        Permission.objects.exclude(pk__in=list(permissions_of(model).values_list("pk", flat=True)))
        .order_by()
        .values("id")
    )
    select, values = others.query.sql_with_params()
    through: Any = User.user_permissions.through
    with connection.cursor() as cursor:  # in the database: to make the rows here takes ten times as long
        cursor.execute(
            f"INSERT INTO {through._meta.db_table} (user_id, permission_id) SELECT %s, id FROM ({select}) AS other",
            [user.pk, *values],
        )
    CLIENT.cookies.clear()
    CLIENT.force_login(user)
    return user


def now_with(user: User, model: type[models.Model], held: Permissions) -> Client:
    """Let a user who is signed in have these permissions of a table from now on, and no others of it."""
    through: Any = User.user_permissions.through
    own = dict(permissions_of(model).values_list("pk", "codename"))
    through.objects.filter(user_id=user.pk, permission_id__in=own).delete()
    given = [pk for pk, codename in own.items() if short(codename) in held]
    through.objects.bulk_create(through(user_id=user.pk, permission_id=pk) for pk in given)
    CLIENT.cookies.pop("messages", None)  # the unread ones
    return CLIENT


def state() -> dict[str, list[Any]]:
    """Return the contents of the app's tables and of Django's own log, without empty tables."""
    tables: list[Any] = [*own_models(include_auto_created=True), LogEntry]
    found = {}
    with connection.cursor() as cursor:
        # Most are empty, and one statement for all of them takes a tenth of the time of one for each.
        cursor.execute("SELECT " + ", ".join(f"EXISTS (SELECT 1 FROM {table._meta.db_table})" for table in tables))
        for table in itertools.compress(tables, cursor.fetchone()):
            cursor.execute(f"SELECT * FROM {table._meta.db_table} ORDER BY {table._meta.pk.column}")
            found[table._meta.label] = cursor.fetchall()
    return found


# For each page: who may get it, who may post to it, and what is posted. A post by those who may must change
# something; a post by others must not.


class Page:
    def __init__(self, get: Test, post: Test | None = None, *, changes: bool = True, query: str = "") -> None:
        self.get, self.post = get, post or get
        self.changes, self.query = changes and post is not None, query


def page_of(model: type[models.Model], name: str) -> Page:
    edited = model in EDITED
    pages = {
        "changelist": Page(see),
        "add": Page(may("add"), may("add")) if edited or model is Adjustment else Page(nobody),
        "history": Page(see),
        "delete": Page(may("delete"), may("delete")) if edited else Page(nobody),
        "change": Page(see, may("change")) if edited else Page(see, nobody),
    }
    if model in AUDITED:
        pages["simple_history"] = Page(see, may("change"))
    if model is Inspect:
        pages["keys"] = pages["accounts"] = Page(see, query="?q=user")
    if model is Rule:
        tries = Page(lambda held: not held.isdisjoint({"add", "change"}))
        pages["enforce"] = Page(may("change"), may("change"))
        pages |= dict.fromkeys(("preview", "trial", "yesterday"), tries)
    if model is KeyOverride:
        pages["end"] = Page(may("change"), may("change"))
    if model is Account:
        pages["move"] = Page(may("change"), may("change"), changes=False)
    if model in IN_FILES:
        pages["import"] = Page(both(may("add"), may("change")), both(may("add"), may("change")))
        pages["export"] = Page(see)
    if model is Report:
        pages["download"] = Page(see)
        pages["download_month"] = Page(see, query="?period=2026-11")
        pages["open"] = Page(see)
        pages["finalise"] = pages["force"] = Page(both(see, may("finalise")), changes=False)
    return pages[name]


def pages(model: type[models.Model]) -> Iterator[str]:
    """Return the names of all admin pages of a model, without the model's own prefix.

    The page that undoes a change is left out. It asks for permissions of another model: tests/admin/changes.
    """
    start = f"{model._meta.app_label}_{model._meta.model_name}_"
    for pattern in ADMINS[model].get_urls():
        if pattern.name is None:  # Django's redirect from the old addresses
            assert str(pattern.pattern) == "<path:object_id>/"
            continue
        assert pattern.name.startswith(start)
        if pattern.name == "ratelimits_change_undo":
            continue
        yield pattern.name.removeprefix(start)


def address(model: type[models.Model], name: str, row: Any) -> str:
    arguments: list[Any] = [] if name in OF_ALL_ROWS else [row.pk]
    if name == "simple_history":
        arguments.append(model.history.filter(id=row.pk).latest().pk)  # type: ignore[attr-defined]
    return reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_{name}", args=arguments)


def posted(model: type[models.Model], name: str, row: Any) -> dict[str, Any]:
    if name == "delete":
        return {"post": "yes"}
    if name == "import":
        header = {"Account": "identifier,name", "KeyOverride": "key,rule"}.get(model.__name__, "key,plan")
        return {"file": SimpleUploadedFile("rows.csv", f"{header}\nuser:{next(_numbers)},x".encode())}
    if name == "enforce":
        return {"_confirmed": "1"}
    if name == "end":
        return {"_confirmed": "1", "reason": "over"}
    if name not in ("add", "change", "simple_history"):
        return {}
    values = typed(model)
    if name == "simple_history":
        values = {key: value for key, value in values.items() if not key.startswith("inclusions")}
    return values


CASES = [(model, name) for model in ADMINS for name in pages(model)]


@pytest.mark.parametrize(("model", "name"), CASES, ids=lambda case: case if isinstance(case, str) else case.__name__)
def test_a_page_is_for_those_who_may(model: type[models.Model], name: str) -> None:
    page, user = page_of(model, name), signed_in(model)
    for held in held_by_people(model):
        row, client = row_of(model), now_with(user, model, held)
        if name == "enforce":
            model._default_manager.filter(pk=row.pk).update(mode="shadow")
        url = address(model, name, row) + page.query
        about = f"{sorted(held)} at {url}"
        values = posted(model, name, row)
        if name == "enforce":
            values["version"] = model._default_manager.values_list("version", flat=True).get(pk=row.pk)
        before = state()
        assert client.get(url).status_code == (200 if page.get(held) else 403), f"GET by {about}"
        assert state() == before, f"GET by {about}"
        response = client.post(url, values)
        if not page.post(held):
            assert response.status_code == 403, f"POST by {about}"
        else:
            assert response.status_code == (302 if page.changes else 200), f"POST by {about}: {said(response)}"
        assert (state() != before) == (page.changes and page.post(held)), f"POST by {about}"


def said(response: Any) -> Any:
    context = response.context
    return context["errors"] if context and "errors" in context else response


@pytest.mark.parametrize(("model", "name"), CASES, ids=lambda case: case if isinstance(case, str) else case.__name__)
def test_a_page_is_for_staff(model: type[models.Model], name: str) -> None:
    client = client_with(model, frozenset({"view", "add", "change", "delete"}), staff=False)
    row = row_of(model)
    url = address(model, name, row) + page_of(model, name).query
    for who in ("not of the staff", "anonymous"):
        if who == "anonymous":
            client.logout()
        values, before = posted(model, name, row), state()
        for response in (client.get(url), client.post(url, values)):
            assert response.status_code == 302, who
            assert response["Location"].startswith(f"{SITE}/admin/login/"), who
        assert state() == before, who


#: For each action: which of the users who see the list may take it, and whether it changes anything here.
ACTIONS: dict[tuple[str, str], tuple[Test, bool]] = {
    **{(model.__name__, "delete_selected"): (may("delete"), True) for model in EDITED},
    **{("Rule", name): (may("change"), True) for name in ("enforce", "shadow", "switch_off")},
    **{("QuarantinedBatch", name): (may("resolve"), True) for name in ("accept", "discard")},
    ("AlertDelivery", "again"): (may("change"), True),
    ("Account", "erase_customer"): (may("erase"), True),
    ("DurabilityGap", "acknowledge"): (may("acknowledge"), True),
    ("Report", "verify"): (see, False),
    ("Adjustment", "finalise"): (see, False),  # and may finalise: tests/admin/test_open_periods.py
    **{("Adjustment", name): (may("change"), True) for name in ("approve", "refuse")},
}


def action_names(model: type[models.Model]) -> list[str]:
    # Before Django 6.1, an action is a tuple.
    actions: Any = ADMINS[model]._get_base_actions()  # type: ignore[attr-defined]
    every = [action[1] if django.VERSION < (6, 1) else action.name for action in actions]
    return [name for name in every if name != "delete_selected" or model in EDITED]


@pytest.mark.parametrize(
    ("model", "name"),
    [(model, name) for model in ADMINS for name in action_names(model)],
    ids=lambda case: case if isinstance(case, str) else case.__name__,
)
def test_an_action_is_for_those_who_may(model: type[models.Model], name: str) -> None:
    (test, changes), user = ACTIONS[model.__name__, name], signed_in(model)
    for held in held_by_people(model):
        row, client = row_of(model), now_with(user, model, held)
        if name == "again":
            model._default_manager.filter(pk=row.pk).update(state="failed")
        if name in ("approve", "refuse"):
            model._default_manager.filter(pk=row.pk).update(approval="waiting")
        before = state()
        values = {"action": name, "_selected_action": [row.pk], "post": "yes"}
        if name == "erase_customer":
            values["_confirmed"] = "yes"
        if name == "acknowledge":
            model._default_manager.filter(pk=row.pk).update(acknowledged_at=None)
            before, values = state(), values | {"_confirmed": "yes", "reason": "seen"}
        response = client.post(address(model, "changelist", row), values, follow=see(held))
        expected = both(see, test)(held)
        assert response.status_code == (200 if see(held) else 403), sorted(held)
        assert (state() != before) == (expected and changes), sorted(held)
        if see(held):
            messages = {str(message) for message in response.context["messages"]}
            assert bool(messages - {"No action selected."}) == expected, (sorted(held), messages)


def test_a_table_has_the_permissions_that_a_page_asks_for_and_no_others() -> None:
    asked: dict[str, set[str]] = {"AlertDelivery": {"change", "view"}, "Adjustment": {"add", "change", "view"}}
    asked |= {model.__name__: {"add", "change", "delete", "view"} for model in {*EDITED, PlanInclusion, PlanPrice}}
    found = {}
    for model in own_models():
        # simple_history can ask for the permission to view a history.
        has_page = model in admin.site._registry or model.__name__.startswith("Historical")
        asked.setdefault(model.__name__, {"view"} if has_page else set())
        names = permissions_of(model).values_list("codename", flat=True)
        found[model.__name__] = {name.rpartition("_")[0] for name in names} - {""}
    assert found == asked


def test_nobody_deletes_selected_rows_of_what_workers_write(admin_client: Client) -> None:
    for model in ADMINS.keys() - EDITED:
        row, values = row_of(model), {"action": "delete_selected", "post": "yes"}
        before = state()
        admin_client.post(address(model, "changelist", row), {**values, "_selected_action": [row.pk]})
        assert state() == before


COMPLETED = [(model, field) for model, page in ADMINS.items() for field in page.autocomplete_fields]


@pytest.mark.parametrize(("model", "field"), COMPLETED)
def test_names_are_completed_for_those_who_may_see_them(model: type[models.Model], field: str) -> None:
    target: Any = model._meta.get_field(field).related_model
    row_of(target)
    about: dict[str, Any] = {
        "app_label": model._meta.app_label,
        "model_name": model._meta.model_name,
        "field_name": field,
    }
    user = signed_in(target)
    for held in held_by_people(target):
        client = now_with(user, target, held)
        response = client.get(reverse("admin:autocomplete"), about)
        assert response.status_code == (200 if see(held) else 403), sorted(held)
    assert Client().get(reverse("admin:autocomplete"), about).status_code == 302


class TestTheHistory:
    def url(self, row: Any) -> str:
        return address(type(row), "simple_history", row)

    def test_who_may_only_look_reads_a_former_state_as_text(self) -> None:
        row = row_of(Rule)
        page = client_with(Rule, frozenset({"view"})).get(self.url(row)).content.decode()
        assert f'<div class="readonly">{row.name}</div>' in page
        assert 'name="capacity"' not in page
        assert "Revert" not in page

    def test_a_former_state_is_brought_back_as_an_edit(self) -> None:
        row = row_of(Rule)
        former = row.history.latest()
        Rule.objects.filter(pk=row.pk).update(capacity=20)
        version = Rule.objects.get(pk=row.pk).version
        client = client_with(Rule, frozenset({"change"}))
        page = client.get(address(Rule, "simple_history", row).replace(str(row.history.latest().pk), str(former.pk)))
        assert "Revert" in page.content.decode()
        form = page.context["adminform"].form
        values = {name: form[name].value() for name in form.fields if form[name].value() not in (None, False)}
        assert client.post(page.request["PATH_INFO"], values).status_code == 302
        changed = Rule.objects.get(pk=row.pk)
        assert (changed.capacity, changed.version) == (10, version + 1)
        record = row.history.latest()
        assert (record.version, record.history_user.pk) == (version + 1, int(client.session["_auth_user_id"]))

    def test_what_makes_no_sense_is_not_brought_back(self) -> None:
        row, values = row_of(Rule), {**typed(Rule), "rate": "0"}
        before = state()
        response = client_with(Rule, frozenset({"change"})).post(self.url(row), values)
        assert "rate must be above 0, not 0." in response.content.decode()
        assert state() == before

    @pytest.mark.parametrize(("held", "status"), [({"change"}, 403), ({"change", "add"}, 302)])
    def test_a_row_that_was_deleted_comes_back_for_those_who_may_add_one(self, held: set[str], status: int) -> None:
        row = row_of(Rule)
        url, pk = self.url(row), row.pk
        row.delete()
        client = client_with(Rule, frozenset(held))
        assert client.get(url).status_code == 200
        assert client.post(url, typed(Rule)).status_code == status
        assert Rule.objects.filter(pk=pk).exists() == (status == 302)

    def test_permission_for_the_history_alone_changes_no_rule(self, settings: Any) -> None:
        settings.SIMPLE_HISTORY_ENFORCE_HISTORY_MODEL_PERMISSIONS = True
        row = row_of(Rule)
        values, before = typed(Rule), state()
        client = client_with(Rule, frozenset({"view"}))  # and all permissions of the history's table
        assert client.get(self.url(row)).status_code == 200
        assert client.post(self.url(row), values).status_code == 403
        assert state() == before

    def test_a_project_may_have_nothing_brought_back(self, settings: Any) -> None:
        settings.SIMPLE_HISTORY_REVERT_DISABLED = True
        row = row_of(Rule)
        assert client_with(Rule, frozenset({"change"})).post(self.url(row), typed(Rule)).status_code == 403

    @pytest.mark.parametrize("page", ["x/history/", "x/history/1/", "1/history/x/", "7/history/"])
    def test_what_is_no_row_is_not_found(self, admin_client: Client, page: str) -> None:
        assert admin_client.get(f"/admin/ratelimits/rule/{page}").status_code == 404


class TestWhatIsShownOfOtherTables:
    def test_a_webhook_s_secret_is_written_by_those_who_may_change_it_and_never_shown(self) -> None:
        row = row_of(AlertChannel)
        for held, asked in ((frozenset({"view"}), False), (frozenset({"change"}), True)):
            page = client_with(AlertChannel, held).get(address(AlertChannel, "change", row)).content.decode()
            assert row.secret not in page
            assert ('name="secret"' in page) == asked

    def test_a_plan_s_rules_are_for_those_who_may_see_rules(self) -> None:
        row = row_of(Rule)
        # A short name could stand in the page's random token by chance.
        Rule.objects.filter(pk=row.pk).update(plan=filled(Plan), name="rule-of-the-plan")
        url = address(Plan, "change", Rule.objects.get(pk=row.pk).plan)
        for held, shown in ((frozenset[str](), False), (frozenset({"view"}), True)):
            assert ("rule-of-the-plan" in client_with(Rule, held).get(url).content.decode()) == shown
