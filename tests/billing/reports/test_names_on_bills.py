"""Test under which name and text a bill states its customer, after account texts went to other customers."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db.models import QuerySet
from django.test import Client

from ratelimits.billing.models import Report
from ratelimits.billing.reports.exports import FORMATS
from ratelimits.billing.reports.statements import rows, statements
from ratelimits.billing.reports.statements.charges import lines_for
from ratelimits.models import Account, Customer
from ratelimits.models.accounts.named import named_now
from ratelimits.usage.alerts.deliver import mail
from ratelimits.usage.customers.move import move
from ratelimits.usage.erasure.erase import erase
from ratelimits.usage.models import Alert, AlertDelivery
from tests.support.customers import present
from tests.support.own_apps import list_path
from tests.support.reports.edits import edit_at
from tests.support.reports.invoices import account, close, spend
from tests.support.reports.priced import findings, priced
from tests.support.usage.traffic import at, flow

pytestmark = pytest.mark.django_db(transaction=True)

NOVEMBER = at("2026-11-01") // 10**6


def customer(text: str) -> Customer:
    return present("default", [text])[text]


def file(form: str = "focus", month: str = "2026-10") -> list[dict[str, str]]:
    """Return the rows of a month's file."""
    content = b"".join(FORMATS[form].stream(lines_for(FORMATS[form], statements(month)))).decode()
    return list(csv.DictReader(io.StringIO(content)))


def merged() -> dict[str, str]:
    """Merge "sold" into "buyer" after October. Return the name of each customer, by token."""
    priced("sold", included=1)
    priced("buyer", included=1)
    for text in ("sold", "buyer"):
        spend(text, "2026-10-05", 50)
    flow()
    expected = {customer("sold").token: "Sold Ltd.", customer("buyer").token: "Buyer Ltd."}
    move("sold", customer("buyer"), NOVEMBER)
    return expected


def taken() -> dict[str, str]:
    """Give "sold" to a stranger after October. Return the name of each customer, by token."""
    priced("sold", included=1)
    spend("sold", "2026-10-05", 50)
    flow()
    one = customer("sold")
    stranger = move("sold", None, NOVEMBER).customer
    with edit_at(NOVEMBER * 10**6):
        Account.objects.create(identifier="sold", name="Stranger Inc")
    spend("sold", "2026-11-01T02:00", 1)
    assert stranger != one
    return {one.token: "Sold Ltd."}


@pytest.mark.parametrize("scenario", [merged, taken])
def test_a_bill_has_the_name_of_its_own_customer(scenario: Any) -> None:
    expected = scenario()
    provisional = {row["BillingAccountId"]: row["BillingAccountName"] for row in file()}
    assert provisional == expected
    reports = [report for report in close("2026-11-02") if report.label == "2026-10"]
    assert {report.customer_id: report.prices["account_name"] for report in reports} == expected
    assert {row["BillingAccountId"]: row["BillingAccountName"] for row in file()} == expected
    # A later version has the name of its own customer, too.
    spend("sold", "2026-10-06", 7)
    (late,) = close("2026-11-03")
    assert late.version == 2
    assert late.prices["account_name"] == expected[late.customer_id] == "Sold Ltd."
    assert findings() == ""


def test_an_alert_names_its_own_customer_and_not_the_one_who_has_its_text_now() -> None:
    (token,) = taken()
    with edit_at(NOVEMBER * 10**6):
        Account.objects.filter(identifier="sold").update(timezone="Asia/Tokyo")
    alert = Alert.objects.create(
        id="00000000-0000-0000-0000-000000000001",
        customer=Customer.objects.get(token=token),
        account="sold",
        meter="requests",
        rule=0,
        period=at("2026-10-01") // 10**6,
        period_end=NOVEMBER,
        threshold=80,
        basis="included",
        used=40,
        quantity=50,
    )
    delivery = AlertDelivery(alert=alert, kind="email")
    message = mail(delivery, "ada@example.com")
    said = f"{message.subject} {message.body}"
    assert "Sold Ltd." in said
    assert "Stranger" not in said
    assert "Tokyo" not in said


def test_a_customer_who_gets_a_further_text_keeps_its_own_on_its_reports() -> None:
    tokens = [*merged()]
    drafts = {each.report.customer_id: each.report.account for each in statements("2026-10")}
    assert [drafts[token] for token in tokens] == ["sold", "buyer"]
    move("another", customer("buyer"), 0)  # It begins with the first name, but was given later.
    reports = close("2026-11-02")
    by_token = {report.customer_id: str(report) for report in reports if report.label == "2026-10"}
    assert [by_token[token] for token in tokens] == ["sold 2026-10 v1", "buyer 2026-10 v1"]
    assert named_now("default", ["sold"])["sold"].account == "buyer"
    assert named_now("default", ["another"])["another"].account == "buyer"
    assert findings() == ""


def test_a_customer_has_one_line_without_usage_whichever_of_its_texts_has_a_row() -> None:
    for text in ("b", "m"):
        account(text)
    spend("a", "2026-09-05", 1)
    flow()
    move("z", customer("a"), at("2026-09-10") // 10**6)
    move("m", customer("b"), at("2026-09-10") // 10**6)
    with edit_at("2026-09-10"):
        Account.objects.create(identifier="z")
    november = list(rows(statements("2026-11", all_accounts=True)))
    assert [(row.account, row.meter) for row in november] == [("a", ""), ("b", "")]
    for text in ("a", "z"):
        assert [row.account for row in rows(statements("2026-11", account=text, all_accounts=True))] == ["a"]
    # Before September, "a" had no account, and the customer of "m" has no text any more.
    assert [row.account for row in rows(statements("2026-08", all_accounts=True))] == ["b"]


def test_the_searches_find_the_reports_of_a_customer_by_its_token_and_its_name(admin_client: Client) -> None:
    merged()
    close("2026-11-02")
    by_text = {report.account: report for report in Report.objects.filter(label="2026-10")}
    sold, buyer = by_text["sold"], by_text["buyer"]

    def found(term: str, model: str = "report") -> set[str]:
        page = admin_client.get(list_path(model), {"q": term})
        return {str(getattr(row, "report", row)) for row in page.context["cl"].result_list}

    for model in ("report", "reportline"):
        for report in (sold, buyer):
            token = report.customer_id
            for term in (token, token.upper(), f" {token}", f"=~{token}"):
                assert found(term, model) == {str(report)}, term
        assert found("Buyer Ltd.", model) == {str(buyer)}
        assert found("Sold Ltd.", model) == {str(sold)}
        assert found("sold", model) == {str(sold), str(buyer)}  # both have had this text
        assert found("a" * 16, model) == set()
    erase(Customer.objects.get(token=sold.customer_id))
    assert found(sold.customer_id) == {str(Report.objects.get(pk=sold.pk))}
    assert found(f"{buyer.customer_id} {buyer.lines.get().key}", "reportline") == {str(buyer)}


def test_the_report_command_takes_a_token_and_says_that_nobody_has_an_account() -> None:
    sold, buyer = merged()
    spend("new", "2026-11-01T02:00", 1)
    flow()

    def accounts(account: str) -> tuple[list[str], bool]:
        out, err = io.StringIO(), io.StringIO()
        call_command("ratelimits_report", period="2026-10", format="csv", account=account, stdout=out, stderr=err)
        found = [row["account"] for row in csv.DictReader(io.StringIO(out.getvalue()))]
        return found, f"'{account}' is neither" in err.getvalue()

    assert accounts(sold) == (["sold"], False)
    assert accounts(buyer) == accounts("buyer") == accounts("sold") == (["buyer"], False)
    assert accounts("new") == ([], False)
    assert accounts("nwe") == accounts("a" * 16) == ([], True)
    Account.objects.create(identifier="idle")
    assert accounts("idle") == ([], False)
    close("2026-11-02")
    assert accounts(sold) == (["sold"], False)


def test_each_command_and_staff_choose_a_customer_by_its_token(admin_client: Client) -> None:
    sold, buyer = merged()

    def run(command: str, account: str, **options: Any) -> tuple[str, bool]:
        out, err = io.StringIO(), io.StringIO()
        call_command(command, account=account, stdout=out, stderr=err, **options)
        return out.getvalue(), f"'{account}' is neither" in err.getvalue()

    assert run("ratelimits_finalise", "nwe", open=True)[1]
    page, unknown = run("ratelimits_finalise", sold, open=True)
    assert ("open: sold 2026-10" in page, "buyer" in page, unknown) == (True, False, False)
    close("2026-11-02")
    QuerySet(Report).filter(account="sold").update(plan="another")
    with pytest.raises(CommandError):
        run("ratelimits_verify", sold)
    assert run("ratelimits_verify", buyer) == run("ratelimits_verify", "buyer")
    assert run("ratelimits_verify", "nwe")[1]
    for token, text in ((sold, "sold"), (buyer, "buyer")):
        response: Any = admin_client.get("/usage/report/", {"period": "2026-10", "account": token})
        content = b"".join(response.streaming_content).decode()
        assert {row["account"] for row in csv.DictReader(io.StringIO(content))} == {text}
