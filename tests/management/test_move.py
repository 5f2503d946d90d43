"""Test the command that moves a name: it shows what it would do, and does it only with --write."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command

from ratelimits.billing.models import Adjustment
from ratelimits.models import Customer, Move, Name
from ratelimits.models.customers import make_missing
from ratelimits.usage.customers.planning import next_quarter
from tests.support.customers import present
from tests.support.reports.invoices import account, close, spend
from tests.support.usage.traffic import at, flow

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("fsync_at_once")]


def customer(text: str) -> Customer:
    make_missing("default", [text])
    return present("default", [text])[text]


def moved(*arguments: str) -> str:
    out = io.StringIO()
    call_command("ratelimits_move", *arguments, stdout=out, stderr=out, no_color=True)
    return out.getvalue()


def test_it_shows_the_effect_and_moves_only_with_write() -> None:
    account("bolt")
    spend(account(), "2026-11-02", 7)
    flow()
    bolt, arguments = customer("bolt"), ("acme", "--to", "bolt", "--since", "2026-11-01")
    out = moved(*arguments)
    assert "Merge: acme is the only text of customer " in out
    assert "counted again  requests  7 " in out
    assert out.endswith("Nothing was moved. Run the command with --write to move the text.\n")
    assert not Move.objects.exists()
    out = moved(*arguments, "--reason", "bought", "--write")
    assert out.endswith(f"acme is a text of customer {bolt.token}.\n")
    row = Move.objects.get()
    assert (row.customer, row.since, row.reason, row.by) == (bolt, at("2026-11-01") // 10**6, "bought", None)
    assert moved(*arguments, "--write") == "The customer has acme already: there is nothing to move.\n"


def test_a_new_customer_from_the_next_quarter_on_is_made() -> None:
    assert "check the spelling" in moved("acme", "--to", "new", "--write")
    former, new = Name.objects.order_by("since").values_list("customer__token", "since")
    assert former[0] != new[0]
    assert abs(new[1] - next_quarter("default")) <= 900


def test_programs_get_json() -> None:
    spend("acme", "2026-11-02", 7)
    flow()
    answer: dict[str, Any] = json.loads(moved("acme", "--to", "new", "--since", "beginning", "--json"))
    assert (answer["kind"], answer["customer"], answer["moved"]) == ("reuse", None, False)
    assert (answer["asked"], answer["since"]) == ("1970-01-01T00:00:00Z", "1970-01-01T00:00:00Z")
    assert answer["usage"][0]["units"] == 7
    former = customer("acme")
    answer = json.loads(moved("acme", "--to", "new", "--since", "beginning", "--json", "--write"))
    assert answer["moved"] is True
    assert (answer["former"], answer["customer"]) == (former.token, customer("acme").token)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["acme", "--to", "bolt"], "Nothing was moved: No customer has the account text or the token bolt"),
        (["acme", "--to", "new", "--since", "2026-11-01T10:10"], "choose a full quarter"),
        (["acme", "--to", "new", "--since", "2999-01-01"], "from the next quarter of an hour on"),
        (["", "--to", "new"], "Anonymous usage belongs to nobody"),
        (["acme", "--to", "new", "--by", "nobody"], "There is no user “nobody”"),
        (["acme", "--to", "new", "--since", "soon"], "invalid moment value: 'soon'"),
    ],
)
def test_what_cannot_be_moved_is_refused_with_the_reason(arguments: list[str], why: str) -> None:
    with pytest.raises(CommandError, match=why):
        moved(*arguments, "--write")
    assert not Move.objects.exists()


def test_a_local_time_that_comes_twice_is_refused(settings: Any) -> None:
    settings.TIME_ZONE = "Europe/Berlin"
    with pytest.raises(CommandError, match="does not exist or comes twice"):
        moved("acme", "--to", "new", "--since", "2026-10-25T02:30")


def test_adjustments_of_closed_periods_need_an_author() -> None:
    spend(account(), "2026-10-20", 6)
    close("2026-11-03")
    arguments = ("acme", "--to", "new", "--since", "2026-10-01", "--write")
    with pytest.raises(CommandError, match=r"choose this moment or a later one\. Or say which user moves it"):
        moved(*arguments)
    User.objects.create(username="ada")
    assert "adjusted  requests  6 " in moved(*arguments, "--by", "ada")
    assert {row.author.get_username() for row in Adjustment.objects.all()} == {"ada"}
