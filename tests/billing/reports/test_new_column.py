"""Test a new column in a copy of the app: it needs one place, and earlier reports verify and keep their bytes."""

from __future__ import annotations

import csv
import json
from hashlib import sha256
from pathlib import Path

from jsonschema import Draft202012Validator

from tests.billing.reports.kept import restore
from tests.support.changed import copied, listed, places, run

TABLE = Path("billing/reports/rows.py")
#: The line to add after the last column of the table.
COLUMN = """
    net_quantity: Annotated[
        int,
        quantity(
            "Units that were admitted and not given back.",
            since=2,
            from_line=lambda line: line.consumed_quantity - line.refunded_quantity,
            listed=True,
        ),
    ]
"""
#: A script that upgrades a database with earlier reports, then corrects one, as after deploying the new column.
USE = """
import json, sys
from datetime import UTC, datetime
from pathlib import Path

from tests.billing.reports.kept import SIGNING_KEY
from tests.support.reports.upgraded import main

directory, names = Path(sys.argv[1]), json.loads(sys.argv[2])
main(directory, SIGNING_KEY, names)

from django.conf import settings
from django.contrib.admin import site
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import RequestFactory, override_settings

from ratelimits.billing.models import Adjustment, Report, ReportLine
from ratelimits.billing.reports.exports.json import schema

author = User.objects.get_or_create(username="finance")[0]
september = datetime(2026, 9, 1, tzinfo=UTC)
Adjustment.objects.create(account="acme", period_start=september, quantity=-3, reason="goodwill", author=author)
with override_settings(RATELIMITS={**settings.RATELIMITS, "SIGNING_KEY": SIGNING_KEY}):
    call_command("ratelimits_finalise", account="acme", stdout=open(directory / "finalised", "w"))
    for name in ("2026-09.csv", "2026-09.json", "2026-09.cloudevents-ndjson", "2026-10.csv"):
        month, form = name.split(".")
        call_command("ratelimits_report", period=month, format=form, output=str(directory / f"new-{name}"))
    call_command("ratelimits_verify", all=True)
(directory / "schema").write_text(json.dumps(schema()))
line = ReportLine.objects.filter(report__columns_version=2).get()
page, request = site._registry[ReportLine], RequestFactory().get("/")
shown = [name in page.get_fields(request, line) for name in ("net_quantity", "consumed_quantity")]
listed = site._registry[Report].inlines[0].fields
print(json.dumps({"admin": shown, "value": page.net_quantity(line), "listed": "net_quantity" in listed}))
"""


def test_a_column_takes_one_place_and_changes_nothing_that_was_finalised_before(tmp_path: Path) -> None:
    copy, out = copied(tmp_path), tmp_path / "out"
    text = (copy / TABLE).read_text()
    last = "            width=60,\n        ),\n    ]\n"
    assert text.count(last) == 1
    (copy / TABLE).write_text(text.replace(last, last + COLUMN.lstrip("\n")))
    assert places(copy) == {str(TABLE)} == set(listed("A column of the reports"))

    out.mkdir()
    before = restore(tmp_path / "kept.sqlite3")
    database_url = f"sqlite:///{tmp_path / 'kept.sqlite3'}"
    verified, again, said = run(copy, USE, str(out), json.dumps(list(before)), DATABASE_URL=database_url).splitlines()
    assert verified == again == "No errors were found."
    assert {name: sha256((out / name).read_bytes()).hexdigest() for name in before} == before
    assert (out / "new-2026-10.csv").read_bytes() == (out / "2026-10.csv").read_bytes()

    # A month of both: earlier reports have nothing in the column, and the same lines as before in JSON.
    lines = list(csv.DictReader((out / "new-2026-09.csv").read_text().splitlines()))
    assert lines[0].keys() - csv.DictReader((out / "2026-09.csv").read_text().splitlines()).__next__().keys() == {
        "net_quantity"
    }
    assert [line["net_quantity"] for line in lines if line["net_quantity"]] == ["-3"]
    document = json.loads((out / "new-2026-09.json").read_text())
    old, new = ((out / name).read_text().splitlines()[1:-1] for name in ("2026-09.json", "new-2026-09.json"))
    (added,) = {line.rstrip(",") for line in new} - {line.rstrip(",") for line in old}
    assert json.loads(added)["net_quantity"] == "-3"
    schema = json.loads((out / "schema").read_text())
    Draft202012Validator(schema).validate(document)
    assert schema["$id"] == document["schema"] == "urn:ratelimits:schema:report:v1.2"
    events = (json.loads(line) for line in (out / "new-2026-09.cloudevents-ndjson").read_text().splitlines())
    assert {event["dataschema"].partition("#")[0] for event in events} == {
        "urn:ratelimits:schema:report:v1",
        "urn:ratelimits:schema:report:v1.2",
    }
    assert json.loads(said) == {"admin": [True, True], "value": -3, "listed": True}
