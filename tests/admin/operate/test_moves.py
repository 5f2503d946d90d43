"""Test the page that moves a name: it shows what changes, and moves the name when the user confirms."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.test import Client

from ratelimits.billing.models import Adjustment
from ratelimits.models import Account, Customer, KeyOverride, Move, Name, Plan
from ratelimits.models.customers import make_missing, waiting_text
from ratelimits.usage.customers.move import move
from ratelimits.usage.customers.planning import next_quarter
from tests.admin.test_usage import text, url
from tests.support.customers import present
from tests.support.reports.invoices import account, close, spend
from tests.support.usage.traffic import at, flow

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("fsync_at_once")]

PAGE = "/admin/ratelimits/account/move/"
SECOND = 10**6


def customer(named: str) -> Customer:
    make_missing("default", [named])
    return present("default", [named])[named]


def typed(**values: Any) -> dict[str, Any]:
    return {"text": "acme", "to": "new", "when": "next", "reason": "ticket 7"} | values


def since(day: str, time: str = "00:00") -> dict[str, str]:
    return {"when": "since", "since_0": day, "since_1": time}


def confirmed(page: Any, **values: Any) -> dict[str, Any]:
    return {**dict(page.context["typed"]), page.context["confirmed"]: "1", **values}


def errors(page: Any) -> str:
    return " ".join(message for messages in page.context["form"].errors.values() for message in messages)


def test_a_text_is_moved_when_the_user_confirms_what_the_page_shows(admin_client: Client) -> None:
    account(), account("bolt")
    spend("acme", "2026-11-02", 7)
    flow()
    former, bolt = customer("acme"), customer("bolt")
    change = admin_client.get(url(Account, "change", Account.objects.get(identifier="acme").pk))
    assert change.context["move_url"] == f"{PAGE}?text=acme"
    assert "Move this name…" in text(change)
    form = admin_client.get(change.context["move_url"])
    assert 'value="acme"' in form.content.decode()
    page = admin_client.post(PAGE, typed(to="existing", customer="bolt", **since("2026-11-01")))
    assert page.context["title"] == "Move acme: merge"
    assert ("counted again", "requests", "7", former.token, "2026-11", bolt.token, "2026-11") in page.context[
        "consequences"
    ].rows
    assert not Move.objects.exists()
    done = admin_client.post(PAGE, confirmed(page), follow=True)
    assert f"Moved: acme is a text of customer {bolt.token} from 2026-11-01 00:00 UTC on." in text(done)
    row = Move.objects.get()
    assert (row.former, row.customer, row.since, row.reason) == (former, bolt, at("2026-11-01") // SECOND, "ticket 7")
    assert row.by == User.objects.get(username="admin")
    entry = LogEntry.objects.get()
    assert f"Moved to customer {bolt.token} from 2026-11-01 00:00 UTC on: ticket 7" in entry.change_message
    assert entry.object_id == str(Account.objects.get(identifier="bolt").pk)
    shown = text(done)
    assert f"got acme of {former.token} from 2026-11-01 00:00 UTC on (merge): ticket 7" in shown


def test_the_page_confirms_a_fixed_quarter_and_customer(admin_client: Client) -> None:
    make_missing("default", ["bolt"])
    quarter = next_quarter("default")
    page = admin_client.post(PAGE, typed(to="existing", customer="bolt"))
    values = confirmed(page)
    assert values["customer"] == customer("bolt").token
    assert abs(int(values["quarter"]) - quarter) <= 900
    early = str(int(values["quarter"]) - 9000)
    page = admin_client.post(PAGE, {**values, "quarter": early})
    assert "Nothing was moved, since the effect has changed. Look at it again." in text(page)
    assert not Move.objects.exists()
    admin_client.post(PAGE, confirmed(page))
    assert Move.objects.get().since == int(early)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"to": "existing"}, "Write a text or the token of the customer."),
        ({"to": "existing", "customer": "nobody"}, "No customer has the account text or the token nobody"),
        ({"when": "since"}, "Write the moment."),
        (since("2026-11-01", "10:10"), "choose a full quarter"),
        (since("2999-01-01"), "from the next quarter of an hour on"),
        ({"reason": ""}, "This field is required."),
        ({"text": ""}, "This field is required."),
        ({"text": "acme", "to": "existing", "customer": "acme"}, "there is nothing to move"),
        ({"customer": "acme"}, "Leave this empty for a new customer."),
        (since("2026-11-01") | {"when": "always"}, "Choose “from an earlier moment on”, or leave this empty."),
        ({"text": "=~gezdgnbvgy3tqojq"}, "stands for a customer without a text"),
        ({"quarter": "x"}, "Enter a whole number."),
    ],
)
def test_what_cannot_be_moved_is_refused_with_the_reason(
    admin_client: Client, values: dict[str, Any], why: str
) -> None:
    make_missing("default", ["acme"])
    page = admin_client.post(PAGE, typed(**values))
    assert why in errors(page)
    assert not Move.objects.exists()


def test_usage_on_reports_is_adjusted_by_users_who_may_add_adjustments(admin_client: Client, client: Client) -> None:
    spend(account(), "2026-10-20", 6)
    close("2026-11-03")
    user = User.objects.create(username="ada", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=["change_account", "view_account"]))
    client.force_login(user)
    values = typed(**since("2026-10-01"))
    assert "choose 2026-11-01 00:00 UTC or a later moment" in errors(client.post(PAGE, values))
    page = admin_client.post(PAGE, values)
    assert page.context["consequences"].rows[0][:3] == ("adjusted", "requests", "6")
    admin_client.post(PAGE, confirmed(page))
    assert sorted(Adjustment.objects.values_list("quantity", "author__username")) == [(-6, "admin"), (6, "admin")]


def test_who_may_not_change_accounts_may_not_move_names(client: Client) -> None:
    user = User.objects.create(username="ada", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename="view_account"))
    client.force_login(user)
    row = account()
    assert client.get(PAGE).status_code == client.post(PAGE, typed()).status_code == 403
    page = client.get(url(Account, "change", row.pk))
    assert page.status_code == 200
    assert "Move this name" not in text(page)


def test_a_move_needs_the_token_of_the_form() -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(User.objects.create_superuser("admin"))
    assert client.post(PAGE, typed()).status_code == 403


def test_the_page_of_an_account_shows_its_customer_all_names_and_all_moves(admin_client: Client) -> None:
    row = account()
    first = customer("acme")
    move("acme-inc", first, at("2026-10-01") // SECOND, reason="new name")
    move("acme", None, at("2026-11-01") // SECOND, reason="given away")
    shown = text(admin_client.get(url(Account, "change", Account.objects.get(identifier="acme-inc").pk)))
    assert first.token in shown
    assert "acme from the beginning until 2026-11-01 00:00 UTC" in shown
    assert "acme-inc since 2026-10-01 00:00 UTC" in shown
    assert f"lost acme to {customer('acme').token} from 2026-11-01 00:00 UTC on (reuse): given away" in shown
    assert Account.objects.get(pk=row.pk).identifier == "acme-inc"
    successor = Account.objects.create(identifier="acme")
    assert "acme since 2026-11-01 00:00 UTC" in text(admin_client.get(url(Account, "change", successor.pk)))


def test_a_customer_without_a_text_gets_one_on_its_page(admin_client: Client) -> None:
    account(timezone="Asia/Tokyo")
    first = customer("acme")
    move("acme")
    waiting = Account.objects.get(identifier=waiting_text(first))
    page = admin_client.get(url(Account, "change", waiting.pk))
    assert page.context["rename_url"] == f"{PAGE}?customer={first.token}"
    assert "move_url" not in page.context
    assert first.token in text(page)
    shown = admin_client.post(PAGE, typed(text="acme-inc", to="existing", customer=first.token))
    assert shown.context["title"] == "Move acme-inc: rename"
    admin_client.post(PAGE, confirmed(shown))
    waiting.refresh_from_db()
    assert waiting.identifier == "acme-inc"


def test_another_link_gives_the_customer_of_an_account_another_name(admin_client: Client) -> None:
    row = Account.objects.create(identifier="old-name", plan=Plan.objects.create(name="Pro", slug="pro"))
    spend("new-name", "2026-11-02", 7)
    flow()
    page = admin_client.get(url(Account, "change", row.pk))
    assert "Give this customer another name…" in text(page)
    form = admin_client.get(page.context["rename_url"]).context["form"]
    assert form.initial == {"customer": "old-name"}
    shown = admin_client.post(PAGE, typed(text="new-name", to="existing", customer="old-name", when="always"))
    assert shown.context["title"] == "Move new-name: rename"
    assert "Rename: customer " in text(shown)
    assert "do the opposite" not in text(shown)
    opposite = admin_client.post(PAGE, typed(text="old-name", to="existing", customer="new-name"))
    assert (
        "old-name has the plan Pro now, and has none afterwards. If new-name is the new name of this customer,"
        " do the opposite: move new-name to the customer of old-name." in text(opposite)
    )
    admin_client.post(PAGE, confirmed(shown))
    reused = admin_client.post(PAGE, typed(text="old-name"))
    assert reused.context["title"] == "Move old-name: reuse"
    assert "Reuse: old-name, a former name of customer " in text(reused)
    assert admin_client.post(PAGE, typed(text="new-name")).context["title"] == "Move new-name: split"


def test_the_accounts_of_a_customer_are_found_by_its_token(admin_client: Client) -> None:
    account(), account("bolt")
    first = customer("acme")
    move("acme-inc", first)
    waiting = move("bolt").former

    def found(term: str) -> list[str]:
        rows = admin_client.get(url(Account), {"q": term}).context["cl"].result_list
        return [row.identifier for row in rows]

    assert found(first.token) == found("acme-inc") == ["acme"]
    assert found(waiting.token) == [waiting_text(waiting)]
    move("acme")
    assert found(first.token) == found("acme") == ["acme-inc"]


def test_what_came_with_a_move_is_undone_by_moving_back(admin_client: Client) -> None:
    KeyOverride.objects.create(key="account:acme", rule="limit", capacity=5)
    make_missing("default", ["acme"])
    move("acme")
    record = KeyOverride.history.latest()
    said = "This came with a move of an account text: move the text back."
    assert said in text(admin_client.get("/admin/ratelimits/change/"))
    page = f"/admin/ratelimits/change/undo/keyoverride/{record.history_id}/"
    for response in (admin_client.get(page, follow=True), admin_client.post(page, {"_confirmed": "1"}, follow=True)):
        assert said in text(response)
    assert KeyOverride.objects.get().key == record.key != "account:acme"


def test_the_identifier_of_an_account_cannot_be_edited(admin_client: Client) -> None:
    row = account()
    page = url(Account, "change", row.pk)
    assert 'name="identifier"' not in admin_client.get(page).content.decode()
    admin_client.post(page, {"identifier": "bolt", "name": "Acme", "timezone": "UTC"})
    row.refresh_from_db()
    assert (row.identifier, row.name) == ("acme", "Acme")


def test_a_former_identifier_cannot_be_restored(admin_client: Client) -> None:
    row = account()
    first = customer("acme")
    move("acme")
    waiting = Account.objects.get(identifier=waiting_text(first))
    move("acme-inc", first)
    assert Account.objects.get(pk=waiting.pk).identifier == "acme-inc"
    _newest, former = Account.history.filter(id=waiting.pk).order_by("-history_id")[:2]
    page = f"/admin/ratelimits/account/{waiting.pk}/history/{former.history_id}/"
    response = admin_client.post(page, {"name": "", "timezone": "UTC"}, follow=True)
    assert "This state is from before a move of an account text" in text(response)
    assert Account.objects.get(pk=row.pk).identifier == "acme-inc"


def test_a_state_from_before_a_move_is_not_restored(admin_client: Client) -> None:
    pro = Plan.objects.create(name="Pro", slug="pro")
    row = Account.objects.create(identifier="old-name", name="Old Name Ltd", plan=pro)
    override = KeyOverride.objects.create(key="account:old-name", rule="limit", capacity=5)
    move("old-name")
    row.refresh_from_db()
    said = "This state is from before a move of an account text"
    for model, pk in ((Account, row.pk), (KeyOverride, override.pk)):
        of_move, former = model.history.filter(id=pk).order_by("-history_id")[:2]
        history = url(model, "history", pk)
        page = admin_client.get(f"{history}{former.history_id}/")
        assert said in text(page)
        assert "Revert" not in text(page)
        refused = admin_client.post(f"{history}{former.history_id}/", {"name": "Old Name Ltd", "plan": pro.pk})
        assert refused.status_code == 302
        assert said in text(admin_client.get(refused["Location"]))
        offered = admin_client.get(f"{history}{of_move.history_id}/")
        assert said not in text(offered)
        assert "Revert" in text(offered)
        assert model.history.filter(id=pk).latest() == of_move
    row.refresh_from_db()
    assert (row.name, row.plan) == ("Old Name Ltd", pro)


def test_an_account_that_was_deleted_before_a_move_is_not_restored_for_the_successor(admin_client: Client) -> None:
    row = account()
    first, pk = customer("acme"), row.pk
    row.delete()
    record = Account.history.filter(id=pk).latest()
    restore = f"{url(Account, 'history', pk)}{record.history_id}/"
    undo = f"/admin/ratelimits/change/undo/account/{record.history_id}/"
    assert "Revert" in text(admin_client.get(restore))
    move("acme")
    said = "This state is from before a move of an account text"
    for page in (restore, undo):
        assert said in text(admin_client.get(page, follow=True))
        assert said in text(admin_client.post(page, {"timezone": "UTC", "_confirmed": "1"}, follow=True))
    assert not Account.objects.exists()
    add = {"identifier": "acme", "name": "Another", "timezone": "UTC"}
    assert admin_client.post(url(Account, "add"), add).status_code == 302  # nothing is asked about the former account
    Account.objects.all().delete()
    move("acme", first)
    assert "Its customer" in text(admin_client.post(url(Account, "add"), add))


def test_a_second_account_of_a_customer_is_refused_in_words(admin_client: Client) -> None:
    account()
    move("acme-inc", customer("acme"))
    page = admin_client.post(url(Account, "add"), {"identifier": "acme-inc", "name": "", "timezone": "UTC"})
    assert "acme-inc is a text of a customer who has the account acme already" in text(page)
    assert list(Account.objects.values_list("identifier", flat=True)) == ["acme"]


def test_who_adds_a_deleted_account_again_reads_whose_text_it_is(admin_client: Client) -> None:
    spend(account(), "2026-11-02", 7)
    flow()
    first = customer("acme")
    gone = admin_client.post(url(Account, "delete", Account.objects.get().pk), {"post": "yes"}, follow=True)
    assert "The customers of deleted accounts keep their texts" in text(gone)
    add, values = url(Account, "add"), {"identifier": "acme", "name": "Another", "timezone": "UTC"}
    page = admin_client.post(add, values)
    assert f"Its customer {first.token} still has this text" in text(page)
    assert not Account.objects.exists()
    admin_client.post(add, confirmed(page))
    assert Account.objects.get().name == "Another"
    assert Name.objects.get().customer == first
    assert admin_client.post(add, {**values, "identifier": "bolt"}).status_code == 302
