"""Test what lines of a file would do: which row each is about, what it changes, and why it is wrong."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from hypothesis import given
from hypothesis import strategies as st

from ratelimits import moments
from ratelimits.engine.program import MAX_LIMITS
from ratelimits.models import Account, KeyOverride, Name, Plan, PlanMembership
from ratelimits.models.customers import make_missing
from ratelimits.models.fields.validity import overlapping, overlaps
from ratelimits.models.keys import key_shard
from ratelimits.row_files import comparing
from ratelimits.row_files.comparing import ComparedLine, LineState, compare
from ratelimits.row_files.tables import MAX_LINES, TABLES, BadFileError, lines, read
from tests.support.rows import rule

pytestmark = pytest.mark.django_db

LATER, LATEST = datetime(2126, 1, 1, tzinfo=UTC), datetime(2127, 1, 1, tzinfo=UTC)
NEW, CHANGED, UNCHANGED, ERROR = LineState.NEW, LineState.CHANGED, LineState.UNCHANGED, LineState.ERROR


@pytest.fixture
def plans() -> tuple[Plan, Plan]:
    return Plan.objects.create(name="Free", slug="free"), Plan.objects.create(name="Pro", slug="pro")


def compared(model: Any, *texts: str) -> list[ComparedLine]:
    """Return the lines of a file in their order."""
    table = TABLES[model]
    source = read("\n".join(texts).encode(), table)
    return sorted((line for part in compare(table, source, "default") for line in part), key=lambda line: line.number)


def states(model: Any, *texts: str) -> list[LineState]:
    return [line.state for line in compared(model, *texts)]


def errors(model: Any, *texts: str) -> dict[int, list[str]]:
    return {line.number: line.errors for line in compared(model, *texts) if line.errors}


class TestMemberships:
    def test_lines_are_new_changed_and_unchanged(self, plans: tuple[Plan, Plan]) -> None:
        for number, plan in enumerate(plans, 1):
            PlanMembership.objects.create(key=f"user:{number}", plan=plan)
        found = compared(PlanMembership, "key,plan", "user:1,pro", "user:2,pro", "user:3,pro")
        assert [line.state for line in found] == [CHANGED, UNCHANGED, NEW]
        assert found[0].changes == [("plan", "free", "pro")]
        assert found[2].changes == [("key", "", "user:3"), ("plan", "", "pro")]

    def test_two_spellings_of_one_key_are_one_key(self, plans: tuple[Plan, Plan]) -> None:
        PlanMembership.objects.create(key="header:x-tenant=acme", plan=plans[1])
        lines_of_file = "key,plan", "header:X_TENANT= acme,pro", "arg:pk=7,pro", "arg:pk=07,free"
        found = compared(PlanMembership, *lines_of_file)
        assert [line.state for line in found] == [UNCHANGED, ERROR, ERROR]
        assert found[1].name == "arg:pk=7"

    def test_what_is_wrong_is_said_with_what_to_do(self, plans: tuple[Plan, Plan]) -> None:
        found = errors(
            PlanMembership,
            "key,plan,valid_from,valid_until",
            "user:1,gold,,",
            "user 2,pro,,",
            ",pro,,",
            "account:7,pro,,",
            "user:5,pro,tomorrow,",
            "user:6,pro,2126-01-02,2126-01-01",
            "user:7,pro",
            "user:8,,,",
        )
        assert list(found) == [2, 3, 4, 5, 6, 7, 8, 9]
        assert found[2] == ["plan: There is no plan with the slug “gold”. These slugs exist: free, pro."]
        assert "user 2 is not a key: write a kind, a colon and an id" in found[3][0]
        assert "choose the plan on the page of the account" in found[5][0]
        assert found[6] == ["valid_from: Write a moment such as 2026-12-01T00:00:00+00:00, or leave the cell empty."]
        assert "The end is not after the start" in found[7][0]
        assert found[8] == ["This line has 2 cells, and the header has 4: add or remove separators."]

    def test_a_key_may_be_on_plans_one_after_another_in_any_order_of_lines(self, plans: tuple[Plan, Plan]) -> None:
        PlanMembership.objects.create(key="user:1", plan=plans[0])
        later = "user:1,pro,2126-01-01T00:00Z,"
        now = "user:1,free,,2126-01-01T00:00Z"
        header = "key,plan,valid_from,valid_until"
        assert states(PlanMembership, header, later, now) == [NEW, CHANGED]
        assert states(PlanMembership, header, now, later) == [CHANGED, NEW]
        (alone,) = compared(PlanMembership, header, later)
        assert "valid at the same time as a stored row (… – …)" in alone.errors[0]

    def test_lines_about_one_key_stand_or_fall_together(self, plans: tuple[Plan, Plan]) -> None:
        header = "key,plan,valid_from,valid_until"
        texts = [header, "user:1,free,,2126-01-01T00:00Z", "user:2,pro,,", "user:1,gold,2126-01-01T00:00Z,"]
        found = compared(PlanMembership, *texts)
        assert [line.state for line in found] == [ERROR, NEW, ERROR]
        assert found[0].errors == ["Line 4 has the same key and is wrong: correct line 4 first."]
        overlapping = errors(PlanMembership, header, "user:1,free,,", "user:1,pro,2126-01-01T00:00Z,")
        assert "same time as line 3" in overlapping[2][0]
        assert "same time as line 2" in overlapping[3][0]

    @pytest.mark.parametrize("stored", [True, False])
    def test_a_key_twice_is_wrong(self, plans: tuple[Plan, Plan], stored: bool) -> None:
        if stored:
            PlanMembership.objects.create(key="user:1", plan=plans[0])
        found = errors(PlanMembership, "key,plan", "user:1,pro", "user:1 ,free")
        assert found.keys() == {2, 3}
        assert "Line 2 is about the same row: leave one of the two lines out." in found[3]

    def test_a_line_finds_its_row_by_its_start(self, plans: tuple[Plan, Plan]) -> None:
        PlanMembership.objects.create(key="user:1", plan=plans[0], valid_until=LATER)
        row = PlanMembership.objects.create(key="user:1", plan=plans[0], valid_from=LATER)
        (found,) = compared(PlanMembership, "key,plan,valid_from", "user:1,pro,2126-01-01T00:00Z")
        assert (found.state, found.stored) == (CHANGED, row)
        (unclear,) = compared(PlanMembership, "key,plan", "user:1,pro")
        assert "2 rows with this key are valid now or later: write the “valid_from”" in unclear.errors[0]

    def test_what_ended_is_left_as_it_is(self, plans: tuple[Plan, Plan]) -> None:
        PlanMembership.objects.create(key="user:1", plan=plans[0], valid_until=moments.now() - timedelta(days=1))
        assert states(PlanMembership, "key,plan", "user:1,pro") == [NEW]
        assert states(PlanMembership, "key,plan,valid_from,valid_until", "user:1,pro,,") == [NEW]

    def test_moments_without_an_offset_are_those_of_the_project(self, settings: Any, plans: tuple[Plan, Plan]) -> None:
        settings.TIME_ZONE = "Europe/Berlin"
        (found,) = compared(PlanMembership, "key,plan,valid_from", "user:1,pro,2126-01-01 01:00")
        assert found.row.valid_from == LATER


class TestOverrides:
    def test_numbers_are_read_as_the_form_reads_them(self) -> None:
        rule()
        found = compared(
            KeyOverride, "key;rule;capacity;rate;period;mode", "user:1;burst;5;0.5;5 min;", "user:2;burst;;;;shadow"
        )
        assert [line.state for line in found] == [NEW, NEW]
        assert (found[0].row.capacity, found[0].row.rate, found[0].row.period) == (5, Decimal("0.5"), 300)

    def test_a_typed_rate_gives_the_period_too(self) -> None:
        rule()
        lines = ("user:1,burst,20,10/5min", "user:2,burst,,100 per day")
        (first, second) = compared(KeyOverride, "key,rule,capacity,rate", *lines)
        assert (first.row.capacity, first.row.rate, first.row.period) == (20, 10, 300)
        assert (second.row.capacity, second.row.rate, second.row.period) == (None, 100, 86_400)

    def test_a_wrong_typed_rate_is_said_under_the_column_to_correct(self) -> None:
        rule()
        lines = (
            "user:1,burst,,10/5min,60",
            "user:2,burst,,10/minuet,",
            "user:3,burst,,10/5min,x",
            "user:4,burst,9/x,,",
        )
        wrong = errors(KeyOverride, "key,rule,capacity,rate,period", *lines)
        assert wrong[2] == [
            "period: The rate 10/5min contains a period: empty this field, or write the rate as a number."
        ]
        assert wrong[3][0].startswith("rate: “10/minuet” is not a rate")
        assert wrong[4][0].startswith("period: “x” is not a length of time")
        assert wrong[5][0].startswith("capacity: “9/x” is not a rate")

    def test_what_no_rule_can_use_is_wrong(self) -> None:
        rule(key_kind="user")
        header = "key,rule,capacity,period,mode"
        found = errors(
            KeyOverride,
            header,
            "user:1,brust,5,,",
            "user:2,burst,,,",
            "user:3,burst,many,,",
            "ip:203.0.113.9,burst,5,,",
            "user:5,burst,,soon,",
            "user:6,burst,5,,of",
        )
        assert found[2] == ["rule: No rule has this name. These rules exist: burst."]
        assert found[3] == ["The override changes nothing: give a capacity, rate, period or mode."]
        assert found[4] == ["capacity: “many” is not a whole number: write digits only, such as 1000."]
        assert "share the counter of ip:203.0.113.9" in found[5][0]
        assert found[6][0].startswith("period: ")
        assert found[7] == ["mode: Write one of these words, or leave the cell empty: enforce, shadow, off."]

    def test_the_same_key_may_have_an_override_of_each_rule(self) -> None:
        rule()
        rule("other")
        KeyOverride.objects.create(key="user:1", rule="other", capacity=3)
        texts = ["key,rule,capacity", "user:1,burst,5", "user:1,other,5"]
        assert states(KeyOverride, *texts) == [NEW, CHANGED]


class TestAccounts:
    def test_a_column_that_is_left_out_stays_as_it_is(self, plans: tuple[Plan, Plan]) -> None:
        Account.objects.create(identifier="acme", name="Acme", timezone="Europe/Berlin", plan=plans[0])
        found = compared(Account, "identifier,plan", "acme,pro", "initech,")
        assert [line.state for line in found] == [CHANGED, NEW]
        assert (found[0].row.timezone, found[1].row.timezone) == ("Europe/Berlin", "UTC")

    def test_an_empty_cell_empties(self, plans: tuple[Plan, Plan]) -> None:
        Account.objects.create(identifier="acme", name="Acme", plan=plans[0])
        (found,) = compared(Account, "identifier,name,plan", "acme,,")
        assert found.changes == [("name", "Acme", ""), ("plan", "free", "")]

    @pytest.mark.parametrize("portion", [1, 500])
    def test_a_second_account_of_a_customer_is_wrong(self, portion: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(comparing, "PORTION", portion)
        Account.objects.create(identifier="acme")
        make_missing("default", ["bolt"])
        for text, other in (("acme-inc", "acme"), ("bolt-inc", "bolt")):
            customer = Name.objects.get(identifier=other).customer
            Name.objects.create(identifier=text, customer=customer, shard=key_shard(f"account:{text}"))
        found = compared(Account, "identifier", "acme", "acme-inc", "bolt-inc", "bolt", "cord")
        assert [line.state for line in found] == [UNCHANGED, ERROR, NEW, ERROR, NEW]
        assert "acme-inc is a text of a customer who has the account acme already" in found[1].errors[0]
        assert "bolt is a text of a customer who has the account bolt-inc already" in found[3].errors[0]

    def test_terms_that_make_no_sense_are_wrong(self) -> None:
        found = errors(
            Account, "identifier,timezone,billing_anchor", "a,Mars,", "b,UTC,31st", "c,,", "d,UTC,2026-01-31T06:07"
        )
        assert found[2][0].startswith("timezone: ")
        assert found[3][0].startswith("billing_anchor: ")
        assert found[4] == ["timezone: This field is required."]
        assert "not at a quarter of an hour" in found[5][0]


class TestWholeFiles:
    @pytest.mark.parametrize(
        ("raw", "said"),
        [
            (b"key,plan\nuser:1,caf\xe9\n", "Line 2 is not written in UTF-8: save the file as “CSV UTF-8”"),
            ("key,plan\nuser:1,pro\n".encode("utf-16"), "Line 1 is not written in UTF-8"),
            (b"key,plan,colour\nuser:1,pro,red\n", "There is no column “colour”"),
            (b"key,valid_from\nuser:1,\n", "The column “plan” is missing"),
            (b"key,plan,key\nuser:1,pro,user:1\n", "The file has two columns “key”"),
            (b"user:1,pro\n", "The first line must name the columns"),
            (b"", "The first line must name the columns"),
            (b"key,plan\n\n,\n", "no lines below its header"),
            (b'key,plan\nuser:1,"pro\nuser:2,pro\n', "Line 2 cannot be read"),
            (b"key,plan\n" + b"x" * 20_000_000, "This file has 19.1 MB, but a file can have at most 10 MB"),
            (b"key,plan\n" + b"a,b\n" * (MAX_LINES + 1), "more than 100,000 lines"),
        ],
    )
    def test_a_file_that_cannot_be_read_says_what_to_do(self, raw: bytes, said: str) -> None:
        with pytest.raises(BadFileError, match=said):
            read(raw, TABLES[PlanMembership])

    @pytest.mark.parametrize(
        "raw",
        [
            b"\xef\xbb\xbfkey,plan\r\nuser:1,pro\r\n",
            b"KEY ; Plan\n\nuser:1 ; pro\n;\n",
            b"plan\tkey\npro\tuser:1",
            b'"key","plan"\r"user:1","pro"\r',
        ],
    )
    def test_what_spreadsheets_write_is_read(self, plans: tuple[Plan, Plan], raw: bytes) -> None:
        table = TABLES[PlanMembership]
        ((line,),) = compare(table, read(raw, table), "default")
        assert (line.name, line.row.plan, line.state) == ("user:1", plans[1], NEW)

    def test_a_line_has_the_number_that_an_editor_shows(self) -> None:
        found = errors(Account, "identifier,name,timezone", 'a,"two\nlines",UTC', "", "b,b,Mars")
        assert found.keys() == {5}

    def test_an_export_is_read_as_no_change(self, plans: tuple[Plan, Plan]) -> None:
        rule()
        moment = datetime(2126, 1, 1, 0, 0, 0, 7, tzinfo=UTC)
        for number, end in enumerate((moment, None)):
            PlanMembership.objects.create(
                key="user:1", plan=plans[number], valid_from=None if end else moment, valid_until=end
            )
        for days in (3, 2):  # both have ended
            ended = moments.now() - timedelta(days=days)
            PlanMembership.objects.create(key="user:2", plan=plans[0], valid_until=ended)
        KeyOverride.objects.create(key="user:1", rule="burst", rate=Decimal("0.5"), period=86_400, reason="=cmd()")
        KeyOverride.objects.create(key="account:a;=b", rule="burst", mode="off", reason="'=1 \n-2")
        Account.objects.create(identifier="=1+1", name=" '@home ", billing_anchor="2026-01-31T06:00", plan=plans[0])
        for table in TABLES.values():
            rows = table.model._default_manager.all()
            texts = [",".join(f'"{cell}"' for cell in cells) for cells in lines(table, rows)]
            assert states(table.model, ",".join(table.columns), *texts) == [UNCHANGED] * rows.count()

    def test_the_number_of_queries_is_that_of_the_portions(
        self, plans: tuple[Plan, Plan], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(comparing, "PORTION", 20)
        rule()
        PlanMembership.objects.bulk_create(PlanMembership(key=f"user:{n}", plan=plans[0]) for n in range(12))

        def queries(model: Any, header: str, line: str, count: int) -> int:
            with CaptureQueriesContext(
                connection,
            ) as captured:
                compared(model, header, *(line.format(n) for n in range(count)))
            return len(captured)

        for model, header, line, of_portion in (
            (PlanMembership, "key,plan", "user:{},pro", 1),
            (KeyOverride, "key,rule,capacity", "user:{},burst,5", 1),
            (Account, "identifier,plan", "a{},pro", 2),
        ):
            assert queries(model, header, line, 20) == queries(model, header, line, 2) == 2 + of_portion
            assert queries(model, header, line, 40) == 2 + 2 * of_portion


MOMENTS = st.none() | st.integers(-3, 3)


class TestCrowding:
    """At most MAX_LIMITS rules can apply to one request: a line that switches on one more is refused."""

    HEAD = "key,rule,mode"

    @pytest.fixture(autouse=True)
    def _rules(self) -> None:
        for number in range(MAX_LIMITS - 2):
            rule(f"on-{number}")
        for number in range(4):
            rule(f"off-{number}", mode="off")

    def test_lines_beyond_the_maximum_are_refused_whatever_portion_they_are_in(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for portion in (1, 2, 500):
            monkeypatch.setattr(comparing, "PORTION", portion)
            found = compared(KeyOverride, self.HEAD, *(f"user:1,off-{number},enforce" for number in range(4)))
            assert [line.state for line in found] == [NEW, NEW, ERROR, ERROR]
            assert "121 rules could apply to a request of user:1 in scope “*”" in found[2].errors[0]

    def test_keys_of_one_request_count_together(self) -> None:
        KeyOverride.objects.create(key="user:1", rule="off-0", mode="shadow")
        found = states(
            KeyOverride,
            self.HEAD,
            "user:2,off-1,enforce",
            "account:7,off-2,enforce",
            "ip:192.0.2.1,off-3,enforce",
            "user:3,off-3,off",
            "user:4,off-3,",
        )
        assert found == [NEW, NEW, ERROR, NEW, ERROR], "an override needs a number or a mode"

    def test_a_line_that_switches_a_rule_off_makes_room(self) -> None:
        for number in range(2):
            KeyOverride.objects.create(key="user:1", rule=f"off-{number}", mode="enforce")
        lines_of_file = "user:1,off-0,off", "user:1,off-2,enforce"
        assert states(KeyOverride, self.HEAD, *lines_of_file) == [CHANGED, NEW]
        assert states(KeyOverride, self.HEAD, *reversed(lines_of_file)) == [NEW, CHANGED]
        assert states(KeyOverride, self.HEAD, lines_of_file[1]) == [ERROR]

    def test_overrides_that_switch_on_nothing_are_not_counted(self) -> None:
        rule("on-again")
        rule("on-at-last")
        assert states(KeyOverride, self.HEAD, "user:1,on-0,shadow", "user:1,on-1,enforce") == [NEW, NEW]
        assert states(KeyOverride, self.HEAD, "user:1,on-0,shadow", "user:1,off-0,shadow") == [NEW, ERROR]


@given(st.lists(st.tuples(MOMENTS, MOMENTS), max_size=5))
def test_rows_in_memory_overlap_if_two_are_in_force_at_any_moment(spans: list[tuple[int | None, int | None]]) -> None:
    now = datetime.now(UTC)

    def moment(hour: int | None) -> datetime | None:
        return None if hour is None else now + timedelta(hours=hour)

    rows = [
        PlanMembership(key="user:1", valid_from=moment(start), valid_until=moment(end))
        for start, end in spans
        if start is None or end is None or start < end
    ]

    def in_force(row: PlanMembership, at: datetime) -> bool:
        return (row.valid_from is None or row.valid_from <= at) and (row.valid_until is None or row.valid_until > at)

    moments = [now + timedelta(minutes=30 * half) for half in range(10)]
    crowded = any(sum(in_force(row, at) for row in rows) > 1 for at in moments)
    assert bool(list(overlaps(rows, now))) == crowded


def test_rows_in_memory_overlap_as_those_in_the_database(plans: tuple[Plan, Plan]) -> None:
    row = PlanMembership.objects.create(key="user:1", plan=plans[0], valid_until=LATER)
    for start, end in ((None, None), (LATER, None), (LATER, LATEST), (None, LATER), (moments.now(), LATEST)):
        other = PlanMembership(key="user:1", plan=plans[1], valid_from=start, valid_until=end)
        in_database = overlapping(other, PlanMembership.objects.all()) is not None
        assert bool(list(overlaps([row, other], moments.now()))) == in_database
