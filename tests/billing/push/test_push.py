"""Test what is pushed, and that it is pushed once, with fakes of the billing systems (tests/billing/push/fakes.py)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import timedelta
from time import time
from typing import Any

import pytest
from django.conf import settings
from django.contrib.auth import get_user_model
from django.db.models import QuerySet
from django.test import override_settings

from ratelimits.billing.models import Adjustment, PushDelivery, PushedReport, PushReceiver, Report, ReportLine
from ratelimits.billing.push import deliveries as sending
from ratelimits.billing.push.deliveries import plan, send
from ratelimits.billing.push.receivers import NoneAccepted, receiver
from ratelimits.billing.push.settle import NotSettledError, Settlement, preview, settle
from ratelimits.billing.reports.closing.close import finalise
from ratelimits.conf.setting_rules import LONGEST_POST
from ratelimits.moments import moment, now_of
from ratelimits.progress import Progress
from ratelimits.usage.ledger import crash
from tests.billing.push.conftest import NOW
from tests.billing.push.fakes import Fake, Trouble
from tests.support.reports.invoices import account, close, spend
from tests.support.usage.traffic import at

pytestmark = pytest.mark.django_db


def push(name: str, hours: float = 0) -> Counter[str]:
    """Plan and send, as if it were this number of hours after NOW."""
    now = NOW + timedelta(hours=hours)
    plan(receiver(name), now)
    return send(receiver(name), now)


def october(*names: str, lines: int = 1, meter: str = "requests") -> None:
    """Finalise an October in which each account used 7 requests with each of its keys; the first 5 are included."""
    for name in names or ("acme",):
        payer = account(name, included=5)
        for number in range(lines):
            spend(payer, "2026-10-10T12:00", 7, key=f"api_key:{number:03d}", meter=meter)
    close("2026-11-02")


def adjust(quantity: int = 3, name: str = "acme") -> Report:
    """Add units to October by an adjustment, which makes a further version of the report."""
    author, _ = get_user_model().objects.get_or_create(username="finance")
    Adjustment.objects.create(
        account=name, period_start=moment(at("2026-10-01")), quantity=quantity, reason="x", author=author
    )
    (report,) = finalise(at("2026-11-02"), account=name)
    return report


def states(name: str) -> Counter[str]:
    return Counter(PushDelivery.objects.filter(receiver=name).values_list("state", flat=True))


def identities(name: str, fake: Fake) -> list[str]:
    return [event["id"] if name == "openmeter" else fake.name(event) for event in fake.taken]


def test_a_report_is_pushed_line_by_line_and_never_again(each: tuple[str, Fake]) -> None:
    name, fake = each
    october("acme", "globex", lines=3)
    assert push(name) == {"accepted": 6}
    assert sorted(identities(name, fake)) == sorted(ReportLine.objects.values_list("line_id", flat=True))
    assert push(name) == {}
    assert len(fake.taken) == 6
    assert PushedReport.objects.filter(receiver=name).count() == 2


def test_of_a_further_version_only_its_own_lines_are_pushed(each: tuple[str, Fake]) -> None:
    name, fake = each
    october(lines=3)
    push(name)
    report = adjust()
    assert push(name) == {"accepted": 1}
    (line,) = report.lines.all()
    assert identities(name, fake)[3:] == [line.line_id]


def test_what_arrives_is_what_the_export_says(fakes: dict[str, Fake]) -> None:
    october()
    line = ReportLine.objects.get()
    for name in fakes:
        assert push(name) == {"accepted": 1}
    (event,) = fakes["stripe"].taken
    assert (event["payload"], event["event_name"]) == ({"stripe_customer_id": "acme", "value": "2"}, "requests")
    assert event["timestamp"] == line.charge_period_end // 10**6 - 1
    (event,) = fakes["lago"].taken
    assert (event["external_subscription_id"], event["properties"]["overage_quantity"]) == ("acme", "2")
    (event,) = fakes["openmeter"].taken
    assert (event["subject"], event["source"], event["data"]["line_id"]) == ("acme", "/ratelimits/test", line.line_id)


def test_what_has_nothing_to_bill_is_left_out_and_who_has_no_customer_is_shown(fakes: dict[str, Fake]) -> None:
    october("acme", "free")
    spend(account("small", included=100), "2026-10-10T12:00", 7)
    close("2026-11-02")
    customers: Any = {"acme": "cus_1", "small": "cus_2"}.get
    pushed = settings.RATELIMITS["PUSH"]["stripe"] | {"CUSTOMER": customers}
    with override_settings(RATELIMITS={**settings.RATELIMITS, "PUSH": {"stripe": pushed}}):
        assert push("stripe") == {"accepted": 1}
        assert states("stripe") == {"accepted": 1, "skipped": 1}
        skipped = PushDelivery.objects.get(state="skipped")
        with pytest.raises(NotSettledError, match="still has no customer"):
            settle(receiver("stripe"), [skipped.line_id], Settlement.AGAIN, "ada", "too soon", NOW)
    (event,) = fakes["stripe"].taken
    assert event["payload"]["stripe_customer_id"] == "cus_1"
    assert (skipped.report.account, skipped.overage, skipped.event) == ("free", 2, "")
    assert settle(receiver("stripe"), [skipped.line_id], Settlement.AGAIN, "ada", "has a customer now", NOW) == 1
    assert push("stripe") == {"accepted": 1}
    assert fakes["stripe"].taken[1]["payload"]["stripe_customer_id"] == "free"


@pytest.mark.parametrize("zone", ["Pacific/Kiritimati", "UTC", "America/Los_Angeles"])
def test_reports_of_before_since_are_left_alone_until_since_is_earlier(zone: str, lago: Fake) -> None:
    payer = account("acme", timezone=zone)
    for month in ("2026-08", "2026-09", "2026-10"):
        spend(payer, f"{month}-10T12:00", 7)
    anchored = account("globex", timezone=zone, billing_anchor="2026-08-31T23:00")
    spend(anchored, "2026-09-01T12:00", 7)
    close("2026-11-02")
    assert Report.objects.count() == 4
    given = settings.RATELIMITS["PUSH"]["lago"]
    for since, count in (("2026-09", 3), ("2026-08", 1), ("2026-07", 0)):
        with override_settings(RATELIMITS={**settings.RATELIMITS, "PUSH": {"lago": {**given, "SINCE": since}}}):
            assert push("lago") == ({"accepted": count} if count else {})
    assert len(lago.taken) == 4


def test_a_report_whose_time_zone_is_no_more_keeps_no_push(lago: Fake) -> None:
    spend(account("acme"), "2026-10-10T12:00", 7)
    close("2026-11-02")
    QuerySet(Report).update(timezone="Mars/Olympus")
    given = settings.RATELIMITS["PUSH"]["lago"]
    for since, count in (("2026-11", 0), ("2026-10", 1)):
        with override_settings(RATELIMITS={**settings.RATELIMITS, "PUSH": {"lago": {**given, "SINCE": since}}}):
            assert push("lago") == ({"accepted": count} if count else {})


def test_lago_gets_a_hundred_in_one_request(lago: Fake) -> None:
    october(lines=201)
    assert push("lago") == {"accepted": 201}
    assert [len(names) for names in lago.requests] == [100, 100, 1]


def test_a_lost_answer_is_asked_for_again_under_the_same_identity_and_billed_once(each: tuple[str, Fake]) -> None:
    name, fake = each
    october(lines=3)
    fake.troubles = ["lose"] * 3
    assert push(name) == {}
    for hours in range(1, 8):
        push(name, hours)
    assert states(name) == {"accepted": 3}
    assert sorted(identities(name, fake)) == sorted(ReportLine.objects.values_list("line_id", flat=True))
    assert sum(map(len, fake.requests)) > 3


@pytest.mark.parametrize("name", ["stripe", "lago"])
def test_an_answer_that_ends_in_its_middle_says_nothing(name: str, fakes: dict[str, Fake]) -> None:
    october()
    fakes[name].troubles = ["cut"]
    assert push(name) == {}
    assert PushDelivery.objects.get().unsure_since is not None
    assert push(name, 1) == {"accepted": 1}
    assert len(fakes[name].taken) == 1


def test_lago_may_fail_on_a_batch_that_it_has_and_names_no_event(lago: Fake) -> None:
    """If Lago writes events one by one in a transaction, the second known event is an error 500."""
    october(lines=8)
    lago.troubles = ["lose"]
    answer = lago.answer

    def breaks(events: list[dict[str, Any]], known: list[bool]) -> tuple[int, Any]:
        return (500, None) if sum(known) > 1 else answer(events, known)

    lago.answer = breaks  # type: ignore[method-assign]
    for hours in range(24):
        push("lago", hours / 4)
    assert states("lago") == {"accepted": 8}
    assert len(lago.taken) == 8


def test_an_event_keeps_its_identity_and_text_whatever_is_changed_meanwhile(fakes: dict[str, Fake]) -> None:
    october()
    for fake in fakes.values():
        fake.troubles = ["drop"]
    for name in fakes:
        assert push(name) == {}
    before = {row.receiver_id: row.event for row in PushDelivery.objects.all()}
    changed = {**settings.RATELIMITS, "BILLING_CUSTOMER": lambda _account: "other", "NAMESPACE": "other"}
    with override_settings(RATELIMITS=changed):
        for name in fakes:
            assert push(name, 1) == {"accepted": 1}
    assert {row.receiver_id: row.event for row in PushDelivery.objects.all()} == before
    assert fakes["openmeter"].taken[0]["source"] == "/ratelimits/test"
    assert fakes["stripe"].taken[0]["payload"]["stripe_customer_id"] == "acme"


@pytest.mark.parametrize("name", ["stripe", "openmeter"])
def test_an_answer_lost_more_than_a_day_ago_is_stated_and_not_guessed(name: str, fakes: dict[str, Fake]) -> None:
    october()
    fake = fakes[name]
    fake.troubles = ["lose"]
    push(name)
    assert push(name, 23) == {"unsure": 1}
    fake.now = lambda: NOW.timestamp() + 99 * 3600
    assert push(name, 99) == {}
    assert len(fake.taken) == 1
    row = PushDelivery.objects.get()
    assert f"check if {receiver(name).service.label} has the event" in row.note
    assert settle(receiver(name), [row.line_id], Settlement.ACCEPTED, "ada", "found in its log", NOW) == 1
    assert push(name, 100) == {}
    row.refresh_from_db()
    assert (row.state, row.note) == ("accepted", "accepted by ada: found in its log")


class Killed(BaseException):
    """Raised where a worker dies."""


def test_a_worker_whose_clock_is_a_day_ahead_dies_after_the_event_was_accepted(
    fakes: dict[str, Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The age of a delivery is the database's, so nothing is sent again when the billing system has forgotten it."""
    october()
    fake, begun, day = fakes["openmeter"], now_of("default"), timedelta(days=1)
    fake.now = begun.timestamp

    def die(step: str) -> None:
        if step == "push:answered":
            raise Killed

    with monkeypatch.context() as worker:
        ahead = time() + day.total_seconds()
        worker.setattr("time.time", lambda: ahead)
        worker.setattr("ratelimits.moments.now", lambda: begun + day)
        worker.setattr(crash, "reached", die)
        plan(receiver("openmeter"))
        with pytest.raises(Killed):
            send(receiver("openmeter"))
    assert len(fake.taken) == 1
    unsure_since = PushDelivery.objects.get().unsure_since
    assert unsure_since is not None
    assert timedelta() <= unsure_since - begun < timedelta(hours=1)
    fake.now = (begun + day * 1.1).timestamp
    assert send(receiver("openmeter"), begun + day * 1.1) == {"unsure": 1}
    assert len(fake.taken) == 1


def test_an_answer_that_was_lost_later_than_now_is_stated_and_not_guessed(fakes: dict[str, Fake]) -> None:
    """Put the clock of the database back by a day after an answer was lost: the age of the delivery is unknown."""
    october()
    fake = fakes["openmeter"]
    fake.troubles = ["lose"]
    assert push("openmeter", 24) == {}
    [(row, would_be_sent)] = preview(receiver("openmeter"), NOW + timedelta(hours=1), Progress())
    assert (row.state, would_be_sent) == ("unsure", False)
    assert push("openmeter", 1) == {"unsure": 1}
    fake.now = lambda: NOW.timestamp() + 25 * 3600
    assert push("openmeter", 25) == {}
    assert len(fake.taken) == 1


def test_lago_recognises_an_event_for_ever(lago: Fake) -> None:
    october()
    lago.troubles = ["lose"]
    push("lago")
    assert push("lago", 24 * 300) == {"accepted": 1}
    assert len(lago.taken) == 1


def test_a_person_who_found_nothing_has_it_sent_again_under_the_same_identity(stripe: Fake) -> None:
    october()
    stripe.troubles = ["drop"]
    push("stripe")
    push("stripe", 30)
    row = PushDelivery.objects.get(state="unsure")
    settle(receiver("stripe"), [row.line_id], Settlement.AGAIN, "ada", "it is not there", NOW)
    assert push("stripe", 30) == {"accepted": 1}
    assert [stripe.name(event) for event in stripe.taken] == [row.line_id]


def test_what_stripe_takes_no_more_is_stated(stripe: Fake) -> None:
    october()
    late = timedelta(days=36).total_seconds() / 3600
    assert push("stripe", late) == {"expired": 1}
    row = PushDelivery.objects.get()
    assert "older than 35 days" in row.note
    assert stripe.requests == []
    settle(receiver("stripe"), [row.line_id], Settlement.ELSEWHERE, "ada", "on invoice 7")
    assert states("stripe") == {"elsewhere": 1}
    with pytest.raises(NotSettledError, match="nothing to settle"):
        settle(receiver("stripe"), [row.line_id], Settlement.AGAIN, "ada", "oops")


def test_an_event_whose_answer_was_lost_is_not_called_too_old(stripe: Fake) -> None:
    october()
    stripe.troubles = ["lose"]
    days_34 = 24 * 34 - 24 * 23
    assert push("stripe", days_34) == {}
    PushDelivery.objects.update(happened_at=NOW - timedelta(days=35 - 11))
    later = NOW + timedelta(hours=days_34 + 2)
    [(row, would_be_sent)] = preview(receiver("stripe"), later, Progress())
    assert (row.state, would_be_sent) == ("unsure", False)
    assert row.note == "an answer was lost, and Stripe accepts no event older than 35 days"
    assert push("stripe", days_34 + 2) == {"unsure": 1}


def test_a_refused_event_says_why_holds_up_no_other_and_can_be_sent_again(each: tuple[str, Fake]) -> None:
    name, fake = each
    fake.unknown = {"tokens"}
    october(lines=8)
    payer = account("globex")
    spend(payer, "2026-10-10T12:00", 7, meter="tokens")
    close("2026-11-02")
    assert push(name) == {"accepted": 8, "refused": 1}
    row = PushDelivery.objects.get(receiver=name, state="refused")
    assert row.meter == "tokens"
    assert {"stripe": "No active meter", "lago": "metric_not_found", "openmeter": "invalid event"}[name] in row.note
    assert push(name, 1) == {}
    with pytest.raises(NotSettledError, match="never accepted"):
        settle(receiver(name), [row.line_id], Settlement.ACCEPTED, "ada", "no")
    fake.unknown = set()
    settle(receiver(name), [row.line_id], Settlement.AGAIN, "ada", "the meter is there now", NOW)
    assert push(name, 2) == {"accepted": 1}
    assert len(fake.taken) == 9


def test_a_receiver_that_is_busy_is_left_alone_for_as_long_as_it_says(each: tuple[str, Fake]) -> None:
    name, fake = each
    october(lines=3)
    fake.troubles = [(429, {"Retry-After": "7200"})]
    assert push(name) == {}
    assert push(name, 1.9) == {}
    assert fake.requests == []
    assert PushDelivery.objects.filter(receiver=name, unsure_since=None).count() == 3
    assert push(name, 2) == {"accepted": 3}


def test_a_failure_of_the_receiver_is_tried_again_later_each_time(each: tuple[str, Fake]) -> None:
    name, fake = each
    october()
    fake.troubles = [(503, {}), (500, {}), (503, {"Retry-After": "600"})]
    assert push(name) == {}
    assert PushReceiver.objects.get().paused_until == NOW + timedelta(seconds=30)
    assert push(name, 30 / 3600) == {}
    assert len(fake.troubles) == 2
    assert push(name, 5 / 60) == {}
    assert PushReceiver.objects.get().paused_until == NOW + timedelta(minutes=6)
    assert push(name, 8 / 60) == {}
    assert fake.troubles == []
    assert push(name, 14 / 60) == {}
    assert push(name, 19 / 60) == {"accepted": 1}


@pytest.mark.parametrize("status", [301, 401, 403, 404, 405])
def test_a_wrong_key_or_address_refuses_no_event(status: int, each: tuple[str, Fake]) -> None:
    name, fake = each
    october()
    fake.troubles = [(status, {})]
    assert push(name) == {}
    assert "are URL and KEY right?" in PushReceiver.objects.get(name=name).error
    assert states(name) == {"waiting": 1}
    assert push(name, 1) == {"accepted": 1}


def test_an_answer_that_is_not_of_the_service_accepts_nothing(each: tuple[str, Fake]) -> None:
    name, fake = each
    october()
    fake.troubles = [(200, {})]
    assert push(name) == {}
    assert "is the URL right?" in PushReceiver.objects.get(name=name).error
    assert push(name, 2) == {"accepted": 1}


def test_a_receiver_that_is_away_has_been_sent_nothing(each: tuple[str, Fake]) -> None:
    name, _fake = each
    october()
    pushed = settings.RATELIMITS["PUSH"][name] | {"URL": "http://127.0.0.1:1"}
    with override_settings(RATELIMITS={**settings.RATELIMITS, "PUSH": {name: pushed}}):
        assert push(name) == {}
    assert "ConnectionRefusedError" in PushReceiver.objects.get(name=name).error
    assert PushDelivery.objects.get().unsure_since is None
    assert push(name, 1) == {"accepted": 1}


@pytest.mark.parametrize("name", ["lago", "openmeter"])
def test_one_event_that_breaks_the_receiver_holds_up_no_other(name: str, fakes: dict[str, Fake]) -> None:
    fake = fakes[name]
    october(lines=8)
    plan(receiver(name), NOW)
    poison = PushDelivery.objects.get(receiver=name, line_id=ReportLine.objects.order_by("pk")[3].line_id)
    answer = fake.answer

    def breaks(events: list[dict[str, Any]], known: list[bool]) -> tuple[int, Any]:
        if any(poison.line_id in fake.name(event) for event in events):
            return 500, None
        return answer(events, known)

    fake.answer = breaks  # type: ignore[method-assign]
    for minutes in range(0, 240, 10):
        push(name, minutes / 60)
    assert states(name) == {"accepted": 7, "waiting": 1}
    assert len(fake.taken) == 7


def test_a_claim_outlasts_the_longest_request() -> None:
    assert sending.CLAIM.total_seconds() > 2 * LONGEST_POST


def test_a_claimed_delivery_is_nobody_else_s_until_the_claim_runs_out(stripe: Fake) -> None:
    october()
    plan(receiver("stripe"), NOW)
    assert sending._claim(receiver("stripe"), NOW) is not None
    assert push("stripe") == {}
    assert push("stripe", 0.1) == {"accepted": 1}
    assert len(stripe.requests) == 1


def test_who_slept_between_claiming_and_sending_sends_nothing(stripe: Fake) -> None:
    october()
    plan(receiver("stripe"), NOW)
    claimed = sending._claim(receiver("stripe"), NOW)
    assert claimed is not None
    for slept in (151, -60):
        claimed_at = now_of("default") - timedelta(seconds=slept)
        with pytest.raises(NoneAccepted):
            sending._exchange(receiver("stripe"), replace(claimed, claimed_at=claimed_at))
    assert stripe.requests == []
    assert sending._exchange(receiver("stripe"), claimed).accepted


@pytest.mark.parametrize("trouble", [(403, {}), (500, {})], ids=str)
def test_what_makes_the_receiver_fail_each_time_holds_up_no_other(trouble: Trouble, stripe: Fake) -> None:
    october(lines=4)
    plan(receiver("stripe"), NOW)
    poison, answer = PushDelivery.objects.order_by("pk")[0], stripe.answer
    fails: list[int] = []

    def breaks(events: list[dict[str, Any]], known: list[bool]) -> tuple[int, Any]:
        if events[0]["identifier"] == poison.line_id:
            fails.append(1)
            return int(trouble[0]), None
        return answer(events, known)

    stripe.answer = breaks  # type: ignore[method-assign]
    for minutes in (0, 1, 2, 4, 8, 16, 32, 59):
        push("stripe", minutes / 60)
    assert states("stripe") == {"accepted": 3, "waiting": 1}
    assert 3 <= len(fails) <= 8
    stripe.answer = answer  # type: ignore[method-assign]
    sending.resume(receiver("stripe"), NOW + timedelta(hours=1))
    assert push("stripe", 1) == {"accepted": 1}


def test_a_report_that_cannot_be_planned_keeps_no_other(
    fakes: dict[str, Fake], caplog: pytest.LogCaptureFixture
) -> None:
    october("acme", "broken", "globex")

    def customers(name: str) -> str:
        if name == "broken":
            raise LookupError(name)
        return name

    pushed = settings.RATELIMITS["PUSH"]["stripe"] | {"CUSTOMER": customers}
    with override_settings(RATELIMITS={**settings.RATELIMITS, "PUSH": {"stripe": pushed}}):
        assert push("stripe") == {"accepted": 2}
        assert push("stripe") == {}
    assert "cannot be pushed to stripe" in caplog.text
    assert push("stripe") == {"accepted": 1}
