"""Test moments in projects with `USE_TZ=True` and with `USE_TZ=False`, on the session's database."""

from __future__ import annotations

import ast
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django import forms
from django.core import serializers
from django.core.exceptions import ValidationError
from django.db.models import Max, Min
from django.forms import modelform_factory
from django.utils import timezone
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ratelimits import moments
from ratelimits.billing.models import PushReceiver
from ratelimits.models import Access
from ratelimits.moments.columns import UTCDateTimeField

APP = Path(moments.__file__).parents[1]
#: Zones in which an hour comes twice or a half hour does; the last one has whole days that do not exist.
ZONES = ("UTC", "America/Los_Angeles", "Europe/Paris", "Australia/Lord_Howe", "Asia/Kolkata", "Pacific/Apia")
#: The two moments that Los Angeles calls 01:30 on 1 November 2026.
FIRST, SECOND = datetime(2026, 11, 1, 8, 30, tzinfo=UTC), datetime(2026, 11, 1, 9, 30, tzinfo=UTC)
LOCAL = datetime(2026, 11, 1, 1, 30)

pytestmark = pytest.mark.django_db


@pytest.fixture(params=[True, False], ids=["USE_TZ", "naive"])
def use_tz(request: pytest.FixtureRequest, settings: Any) -> bool:
    settings.TIME_ZONE, settings.USE_TZ = "America/Los_Angeles", request.param
    return bool(request.param)


@pytest.fixture
def naive(settings: Any) -> None:
    settings.TIME_ZONE, settings.USE_TZ = "America/Los_Angeles", False


def stored(moment: datetime | None) -> datetime | None:
    """Write a moment, and return what the database then has."""
    PushReceiver.objects.update_or_create(name="x", defaults={"paused_until": moment})
    read: datetime | None = PushReceiver.objects.get(name="x").paused_until
    return read


@pytest.mark.parametrize("zone", ZONES)
def test_a_moment_comes_back_from_the_database(zone: str, use_tz: bool, settings: Any) -> None:
    settings.TIME_ZONE = zone
    written_in = st.sampled_from([UTC, ZoneInfo(zone), ZoneInfo("Asia/Tokyo")])

    @hypothesis_settings(max_examples=10)
    @example(FIRST, UTC)
    @example(SECOND, UTC)
    @example(FIRST, ZoneInfo("America/Los_Angeles"))
    @example(SECOND, ZoneInfo("America/Los_Angeles"))
    @example(datetime(2026, 3, 8, 9, 59, 59, 999_999, UTC), UTC)
    @example(datetime(2026, 4, 4, 14, 45, tzinfo=UTC), ZoneInfo("Australia/Lord_Howe"))
    @given(st.datetimes(datetime(1971, 1, 1), datetime(2400, 1, 1), timezones=st.just(UTC)), written_in)
    def check(moment: datetime, tz: Any) -> None:
        read = stored(moment.astimezone(tz))
        assert (read, read and read.tzinfo) == (moment, UTC)
        rows = PushReceiver.objects.filter(name="x")
        # Conditions, values without rows and aggregates see the same moment.
        assert rows.filter(paused_until=moment).exists()
        assert not rows.filter(paused_until__gt=moment).exists()
        assert rows.filter(paused_until__lt=moment + timedelta(microseconds=1)).exists()
        assert rows.values_list("paused_until", flat=True).get() == moment
        assert rows.aggregate(Min("paused_until"), Max("paused_until")) == {
            "paused_until__min": moment,
            "paused_until__max": moment,
        }
        # Django writes JSON with milliseconds.
        copies: list[Any] = [
            next(serializers.deserialize(form, serializers.serialize(form, rows))).object for form in ("xml", "json")
        ]
        assert copies[0].paused_until == moment
        assert timedelta(0) <= moment - copies[1].paused_until < timedelta(milliseconds=1)

    check()
    assert stored(None) is None


def test_moments_stay_where_the_setting_changes(settings: Any) -> None:
    settings.TIME_ZONE, settings.USE_TZ = "America/Los_Angeles", False
    for moment in (FIRST, SECOND):
        assert stored(moment) == moment
        settings.USE_TZ, settings.TIME_ZONE = True, "Asia/Tokyo"
        assert PushReceiver.objects.get(name="x").paused_until == moment
        assert stored(moment) == moment
        settings.USE_TZ, settings.TIME_ZONE = False, "America/Los_Angeles"
        assert PushReceiver.objects.get(name="x").paused_until == moment


def test_microseconds_since_1970_are_moments_in_utc() -> None:
    assert moments.moment(-1) == datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC)
    assert moments.when(1_500_000) == "1970-01-01 00:00:01 UTC"
    with pytest.raises(OverflowError):
        moments.moment(2**63)
    assert moments.when(2**63) == f"{2**63} µs after 1970, which is in no calendar"


@pytest.mark.usefixtures("naive")
class TestNaiveProject:
    def test_the_projects_datetimes_are_read_as_local_times(self) -> None:
        row = Access(target="user:1", reason="r", valid_from=LOCAL, valid_until=timezone.now() + timedelta(days=1))
        assert row.valid_from == FIRST
        assert row.valid_until is not None
        assert abs(row.valid_until - moments.now() - timedelta(days=1)) < timedelta(minutes=1)
        row.full_clean()
        row.save()
        assert Access.objects.get(valid_from=LOCAL).valid_from == FIRST
        assert Access.objects.filter(valid_from="2026-11-01 01:30", valid_until__gt=timezone.now()).count() == 1
        Access.objects.update(valid_from=LOCAL.replace(fold=1))
        row.refresh_from_db()
        assert row.valid_from == SECOND

    def test_histories_and_new_rows_have_the_present_moment(self) -> None:
        before = moments.now()
        row = Access.objects.create(target="user:1", reason="r")
        assert before <= row.history.latest().history_date <= moments.now()
        assert not hasattr(row, "_history_date")

    def test_a_form_shows_and_reads_local_times(self) -> None:
        """Django's own inputs would show UTC, and read what was typed as a local time."""
        row = Access(target="user:1", reason="r", valid_from=datetime(2026, 7, 1, 12, tzinfo=UTC))
        for form_class in (None, forms.SplitDateTimeField):
            chosen: Any = {} if form_class is None else {"field_classes": {"valid_from": form_class}}
            factory: Any = modelform_factory(Access, fields=["valid_from"], **chosen)
            shown = str(factory(instance=row)["valid_from"])
            assert "2026-07-01" in shown
            assert "05:00" in shown
            typed: Any = {"valid_from": "2026-07-01 05:00", "valid_from_0": "2026-07-01", "valid_from_1": "05:00"}
            form = factory(typed, instance=row)
            assert (form.is_valid(), form.changed_data) == (True, [])
            assert form.cleaned_data["valid_from"] == row.valid_from

    @pytest.mark.parametrize("text", ["2026-11-01 01:30", "2026-03-08 02:30"])
    def test_a_time_that_comes_twice_or_never_is_refused(self, text: str) -> None:
        form = modelform_factory(Access, fields=["valid_from"])({"valid_from": text})
        assert "The clocks of America/Los_Angeles change" in str(form.errors["valid_from"])

    def test_people_read_the_projects_zone(self) -> None:
        with timezone.override("Asia/Tokyo"):  # Without USE_TZ, Django has one zone.
            assert moments.local_text(datetime(2026, 7, 1, 12, tzinfo=UTC)) == "2026-07-01 05:00 PDT"
            assert moments.zone_name() == "America/Los_Angeles"


def test_people_read_the_zone_of_the_page(settings: Any) -> None:
    settings.USE_TZ = True
    with timezone.override("Asia/Tokyo"):
        assert moments.local_text(datetime(2026, 7, 1, 12, tzinfo=UTC)) == "2026-07-01 21:00 JST"
        assert moments.typed(datetime(2026, 7, 1, 21)) == datetime(2026, 7, 1, 12, tzinfo=UTC)


def test_with_use_tz_django_warns_of_a_datetime_without_a_zone(settings: Any) -> None:
    settings.USE_TZ = True
    assert moments.read(LOCAL) is LOCAL
    with pytest.warns(RuntimeWarning, match="received a naive datetime"):
        stored(LOCAL)


def test_texts_that_are_no_moments_are_refused() -> None:
    with pytest.raises(ValidationError):
        UTCDateTimeField().to_python("soon")


def test_no_other_module_asks_django_for_the_time() -> None:
    """A datetime without a zone, or with Django's idea of it, works only with one of the two settings."""
    found = []
    for path in sorted(APP.rglob("*.py")):
        if path.parent.name == "moments":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.unparse(node) if isinstance(node, ast.ImportFrom | ast.Attribute) else ""
            if text.startswith("from django.utils.timezone") or (
                text.startswith("from django.utils import") and "timezone" in text
            ):
                found.append((path.name, text))
            if text in ("models.DateTimeField", "models.DateField", "models.TimeField", "datetime.utcnow"):
                found.append((path.name, text))
    assert found == []
