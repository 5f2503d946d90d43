from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.test import Client, override_settings

from project.celery import app
from ratelimits.billing import tasks as billing_tasks
from ratelimits.billing.models import PushDelivery, PushedReport, PushReceiver
from ratelimits.conf.setting_rules import complaint
from ratelimits.usage import tasks
from ratelimits.usage.customers.move import move
from tests.admin.test_usage import text, url
from tests.billing.push.fakes import Fake
from tests.billing.push.test_push import october, states
from tests.support.customers import present
from tests.support.terminal import on_a_terminal, stages

pytestmark = pytest.mark.django_db


def run(**about: Any) -> tuple[str, str]:
    """Run the command; return its standard output and error."""
    out, err = io.StringIO(), io.StringIO()
    call_command("ratelimits_push", stdout=out, stderr=err, **about)
    return out.getvalue(), err.getvalue()


def test_a_dry_run_prints_what_would_be_sent_and_changes_nothing(fakes: dict[str, Fake]) -> None:
    october(lines=2)
    out, err = run(dry_run=True, receiver="lago")
    assert [line[:17] for line in out.splitlines()] == ['{"transaction_id"'] * 2
    assert "lago: 2 events would be sent." in err
    assert fakes["lago"].requests == []
    assert not PushDelivery.objects.exists()
    assert not PushedReport.objects.exists()
    assert not PushReceiver.objects.exists()
    out, err = run(dry_run=True, receiver="stripe")
    assert (out, err.count("accepts no event older than 35 days")) == ("", 2)


def test_the_command_sends_and_says_what_became_of_it(fakes: dict[str, Fake]) -> None:
    october(lines=2)
    for name in ("lago", "openmeter"):
        assert "  accepted: 2 lines, 9 units of overage\n" in run(receiver=name)[0]
        assert len(fakes[name].taken) == 2
    out = io.StringIO()
    with pytest.raises(CommandError, match="need a person's decision") as failed:
        call_command("ratelimits_push", stdout=out)
    assert failed.value.returncode == 1
    assert out.getvalue().count("Stripe accepts no event that is older than 35 days") == 2
    assert len(fakes["lago"].taken) == 2


def test_a_terminal_shows_how_much_was_planned_sent_and_settled(
    fakes: dict[str, Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    october(lines=2)
    fakes["lago"].unknown = {"requests"}
    about: dict[str, Any] = {"receiver": "lago"}
    dry = stages(on_a_terminal("ratelimits_push", dry_run=True, **about))
    assert dry == {"reports for lago", "unplanned reports for lago"}
    assert "unplanned reports for lago" in on_a_terminal("ratelimits_push", status=True, **about)
    with pytest.raises(CommandError, match="need a person's decision"):
        on_a_terminal("ratelimits_push", **about)
    fakes["lago"].unknown = set()
    settled = about | {"settle": "again", "all": "refused", "by": "ada", "reason": "the meter exists now"}
    assert stages(on_a_terminal("ratelimits_push", **settled)) == {"deliveries to lago", "written deliveries"}
    sent = on_a_terminal("ratelimits_push", **about)
    assert stages(sent) == {"deliveries to lago"}
    assert re.search(r"deliveries to lago .*2/2 ", sent)


def test_the_state_is_told_without_sending(fakes: dict[str, Fake]) -> None:
    october()
    assert "  without deliveries yet: 1 report\n" in run(status=True, receiver="lago")[0]
    fakes["lago"].troubles = [(503, {})]
    assert "paused until" in run(receiver="lago")[0]
    assert "it answered 503 Service Unavailable" in run(status=True, receiver="lago")[0]
    assert "paused until" in run(receiver="lago")[0]
    assert "  accepted: 1 line," in run(receiver="lago", now=True)[0]


def test_a_person_settles_what_nobody_else_can(fakes: dict[str, Fake]) -> None:
    october("acme", "globex")
    with pytest.raises(CommandError, match="need a person's decision"):
        run(receiver="stripe")
    about = {"settle": "elsewhere", "receiver": "stripe", "by": "ada", "reason": "on invoice 7"}
    with pytest.raises(CommandError, match="is expired, so it was never accepted"):
        run(**about | {"settle": "accepted"}, all="expired")
    first, second = PushDelivery.objects.order_by("pk").values_list("line_id", flat=True)
    assert run(**about, line=[first])[0] == "stripe: 1 line settled as 'elsewhere'.\n"
    assert run(**about, all="expired")[0] == "stripe: 1 line settled as 'elsewhere'.\n"
    assert states("stripe") == {"elsewhere": 2}
    assert PushDelivery.objects.get(line_id=second).note == "elsewhere by ada: on invoice 7"
    run(status=True, receiver="stripe")


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"receiver": "paypal"}, "has no 'paypal', only stripe, lago, openmeter"),
        ({"settle": "again", "line": ["x"], "by": "ada", "reason": "y"}, "needs --receiver"),
        ({"settle": "again", "receiver": "lago", "line": ["x"]}, "needs --by and --reason"),
        ({"settle": "again", "receiver": "lago", "by": "ada", "reason": "y"}, "either --line or --all"),
        ({"settle": "again", "receiver": "lago", "by": "a", "reason": "y", "line": ["x"]}, "no delivery of the line x"),
    ],
)
@pytest.mark.usefixtures("fakes")
def test_what_makes_no_sense_is_an_error(about: dict[str, Any], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        run(**about)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda name: {"acme": "cus_1"}[name], "KeyError: 'globex'"),
        (lambda name: "cus_1" if name == "acme" else 42, "CUSTOMER returns 42 for 'globex': it must return a text"),
        (lambda name: "cus_1" if name == "acme" else "x" * 256, "it must return a text of at most 255 characters"),
    ],
    ids=["raises", "number", "long"],
)
def test_a_report_that_cannot_be_pushed_needs_a_person(answer: Any, why: str, fakes: dict[str, Fake]) -> None:
    october("acme", "globex")
    pushed = settings.RATELIMITS["PUSH"]["lago"] | {"CUSTOMER": answer}
    with override_settings(RATELIMITS={**settings.RATELIMITS, "PUSH": {"lago": pushed}}):
        out, err = run(dry_run=True)
        assert (len(out.splitlines()), why in err) == (1, True)
        for about in ({}, {"status": True}):
            told = io.StringIO()
            with pytest.raises(CommandError, match="need a person's decision"):
                call_command("ratelimits_push", stdout=told, **about)
            assert "  cannot be pushed: globex 2026-10 v1: " in told.getvalue()
            assert why in told.getvalue()
    assert len(fakes["lago"].taken) == 1
    run(receiver="lago")
    assert len(fakes["lago"].taken) == 2


def test_usage_of_a_customer_without_an_account_needs_a_person(fakes: dict[str, Fake]) -> None:
    october("acme", "free")
    acme = present("default", ["acme"])["acme"]
    move("acme")
    customers = {"newname": "cus_1", "acme": "cus_2"}
    pushed = settings.RATELIMITS["PUSH"]["lago"] | {"CUSTOMER": customers.get}
    with override_settings(RATELIMITS={**settings.RATELIMITS, "PUSH": {"lago": pushed}}):
        for about in ({}, {"status": True}):
            out = io.StringIO()
            with pytest.raises(CommandError, match="need a person"):
                call_command("ratelimits_push", stdout=out, **about)
            assert "skipped: acme, 1 line, 2 units of overage: no account names this customer now" in out.getvalue()
            assert "skipped: free" not in out.getvalue()  # it has its name still: it is not billed here
        move("newname", acme)
        acme_line = PushDelivery.objects.get(report__account="acme").line_id
        run(receiver="lago", settle="again", line=[acme_line], by="ada", reason="it has an account again")
        assert "need a person" not in run()[0]
    (event,) = fakes["lago"].taken
    assert event["external_subscription_id"] == "cus_1"


def test_without_billing_systems_there_is_nothing_to_push() -> None:
    with pytest.raises(CommandError, match="names no billing system"):
        run()
    assert "ratelimits.push" not in tasks.beat_schedule()


@pytest.fixture
def _eager() -> Iterator[None]:
    """Run tasks at once in this process."""
    app.conf.task_always_eager = True
    yield
    app.conf.task_always_eager = False


@pytest.mark.usefixtures("_eager")
def test_the_tasks_push_to_each(fakes: dict[str, Fake]) -> None:
    october()
    assert tasks.beat_schedule()["ratelimits.push"]["schedule"] == 300
    billing_tasks.push()
    billing_tasks.push()
    assert {name: len(fake.taken) for name, fake in fakes.items()} == {"stripe": 0, "lago": 1, "openmeter": 1}
    assert states("stripe") == {"expired": 1}
    billing_tasks.push_to("gone")


def test_staff_read_what_was_delivered(fakes: dict[str, Fake], admin_client: Client) -> None:
    october("<b>acme")
    run(receiver="lago")
    row = PushDelivery.objects.get()
    page = admin_client.get(url(PushDelivery, "changelist"), {"q": "<b>acme"})
    assert "accepted" in text(page)
    assert "<b>acme" not in page.content.decode()
    assert row.event[:17] in text(admin_client.get(url(PushDelivery, "change", row.pk)))
    fakes["openmeter"].troubles = [(401, {})]
    run(receiver="openmeter")
    assert "are URL and KEY right?" in text(admin_client.get(url(PushReceiver, "changelist")))


def test_the_documented_settings_make_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "billing" / "pushing.md").read_text()
    (code,) = re.findall(r'```python\n(import os\n.*?"PUSH".*?)```', page, re.DOTALL)
    monkeypatch.setenv("STRIPE_KEY", "sk_test_1")
    names: dict[str, Any] = {}
    exec(code, names)
    assert complaint("PUSH", names["RATELIMITS"]["PUSH"]) == ""
    with override_settings(RATELIMITS={**settings.RATELIMITS, **names["RATELIMITS"]}):
        assert "without deliveries yet: 0" not in run(status=True)[0]


def test_no_message_shows_a_key() -> None:
    wrong = {"stripe": {"KEY": "sk_live_secret", "SINCE": "soon"}}
    with override_settings(RATELIMITS={**settings.RATELIMITS, "PUSH": wrong}):
        with pytest.raises(Exception, match="that is not shown") as failed:
            run()
        assert "sk_live_secret" not in str(failed.value)
        out = io.StringIO()
        with pytest.raises(Exception, match="E002") as refused:
            call_command("check", stdout=out, stderr=out)
        assert "sk_live_secret" not in str(refused.value) + out.getvalue()
