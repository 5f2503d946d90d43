from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from django.test import override_settings
from jsonschema import Draft202012Validator

from ratelimits.billing.reports.exports import FORMATS
from ratelimits.billing.reports.exports.json import line, schema
from ratelimits.billing.reports.rows import PROVISIONAL, Row
from ratelimits.moments import moment
from tests.billing.reports.exports.samples import AWKWARD, DECEMBER, ROW, awkward

Read = Callable[..., list[CloudEvent]]


def batch(*rows: Row) -> list[Any]:
    events = json.loads(b"".join(FORMATS["cloudevents"].stream(rows)))
    assert isinstance(events, list)
    return events


def _of_batch(*rows: Row) -> Iterator[Any]:
    yield from (JSONFormat().read(CloudEvent, json.dumps(event)) for event in batch(*rows))


def _of_lines(*rows: Row) -> Iterator[Any]:
    text = b"".join(FORMATS["cloudevents-ndjson"].stream(rows))
    yield from (JSONFormat().read(CloudEvent, event) for event in text.split(b"\n")[:-1])


@pytest.fixture(params=[_of_batch, _of_lines])
def read(request: pytest.FixtureRequest) -> Read:
    """Return the events as the official SDK reads them; it refuses anything that is not a CloudEvent."""
    return lambda *rows: list(request.param(*rows))


def test_a_line_is_an_event_that_its_line_id_identifies(read: Read) -> None:
    (event,) = read(ROW)
    assert event.get_attributes() == {
        "specversion": "1.0",
        "id": ROW.line_id,
        "source": "/ratelimits/test",
        "type": "ratelimits.report.line.v1",
        "subject": "acme",
        "time": moment(ROW.charge_period_end) - timedelta(microseconds=1),
        "datacontenttype": "application/json",
        "dataschema": "urn:ratelimits:schema:report:v1#/$defs/line",
    }
    assert event.get_data() == json.loads(line(ROW))


def test_the_data_validates_against_the_schema_that_it_names(read: Read) -> None:
    reference = {"$schema": schema()["$schema"], "$ref": read(ROW)[0].get_dataschema()}
    from referencing import Registry, Resource

    registry: Any = Registry().with_resource(schema()["$id"], Resource.from_contents(schema()))
    validator = Draft202012Validator(reference, registry=registry)
    for event in read(ROW, *awkward()):
        validator.validate(event.get_data())
    assert not validator.is_valid({})


def test_the_time_lies_within_the_billing_period_so_that_no_meter_counts_it_in_the_next(read: Read) -> None:
    (event,) = read(ROW._replace(charge_period_end=DECEMBER))
    assert event.get_time() == datetime(2026, 11, 30, 23, 59, 59, 999_999, tzinfo=UTC)


def test_a_report_sent_again_is_the_same_events() -> None:
    assert batch(ROW, *awkward()) == batch(ROW, *awkward())


def test_a_provisional_line_never_stands_in_the_way_of_the_final_one(read: Read) -> None:
    early = ROW._replace(status=PROVISIONAL, report_version=0, consumed_quantity=3)
    events = read(early, early._replace(consumed_quantity=4), early, ROW)
    first, changed, again, final = (event.get_id() for event in events)
    assert first == again
    assert len({first, changed, final}) == 3
    assert [event.get_type().split(".")[2] for event in events] == ["provisional-line"] * 3 + ["line"]


def test_usage_of_no_account_has_a_subject_too(read: Read) -> None:
    (event,) = read(ROW._replace(account=""))
    assert event.get_subject() == "~anonymous"
    assert event.get_data()["account"] == ""  # type: ignore[index, call-overload]


def test_awkward_texts_come_back_as_they_were(read: Read) -> None:
    assert [event.get_subject() for event in read(*awkward())] == list(AWKWARD)


def test_the_source_is_the_project(read: Read) -> None:
    with override_settings(RATELIMITS={"NAMESPACE": "the_shop"}):
        assert read(ROW)[0].get_source() == "/ratelimits/the_shop"


def test_a_report_without_rows_is_an_empty_batch() -> None:
    assert batch() == []
    assert b"".join(FORMATS["cloudevents-ndjson"].stream([])) == b""
