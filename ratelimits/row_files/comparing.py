"""Compare the lines of a file with the rows of its table, and find the effect of each line.

The cells of a line are read with the fields of a form. So a cell accepts the same texts as the field in the admin's
form, except for a plan, which is written as its slug. Most messages are the same too.

The *identity* of a line or a row is its key or its account; for an override, its key and its rule. Several rows can
have the same identity, if they are valid at different times. So all lines with the same identity are checked together.
If one of these lines is wrong, none of them is imported. Each portion of lines needs one query; one of accounts a few.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple

from django import forms
from django.core.exceptions import ValidationError
from django.db.models import ForeignKey
from django.utils.translation import gettext as _

from ratelimits import moments
from ratelimits.algorithms import typed_rates
from ratelimits.algorithms.typed_numbers import PLAIN, Mistyped
from ratelimits.engine.program import MAX_LIMITS
from ratelimits.models import Account, KeyOverride, Rule
from ratelimits.models.accounts import SecondAccountError, other_accounts
from ratelimits.models.customers import customers_of_rows
from ratelimits.models.fields.durations import SecondsFormField, seconds
from ratelimits.models.fields.numbers import TypedNumber, mistyped, typed_formfield
from ratelimits.models.fields.validity import overlaps
from ratelimits.models.keys import canonical_key
from ratelimits.models.validation.rules import crowding_error
from ratelimits.row_files.tables import FileTable, PlansAndRules, Source, SourceLine, written

#: Approximate number of lines in a portion. All lines with the same identity are in the same portion.
PORTION = 500


class Cells:
    """Reads the cells of lines that belong to one table."""

    def __init__(self, table: FileTable, known: PlansAndRules) -> None:
        self._known = known
        self._fields = {name: _form_field(table, name) for name in table.columns}

    def values(self, cells: dict[str, str]) -> tuple[dict[str, Any], list[str]]:
        """Return the values of cells by column, and a sentence for each cell that cannot be read.

        A typed rate, such as "10/5min", also gives the period.
        """
        values, errors = {}, []
        try:
            cells = self._with_numbers(cells)
        except ValidationError as error:
            return {}, [f"{name}: {message}" for name in error.message_dict for message in error.message_dict[name]]
        for name, text in cells.items():
            try:
                values[name] = self._value(name, text)
            except ValidationError as error:
                errors += [f"{name}: {message}" for message in error.messages]
        return values, errors

    def _with_numbers(self, cells: dict[str, str]) -> dict[str, str]:
        """Return the cells with numbers in place of a typed rate.

        Raise ValidationError if the typed rate or the cell `period` is not valid, or if they contradict each other. The
        error names the column to correct.
        """
        # Only overrides have these columns.
        names = ("rate", "capacity") if {"rate", "capacity", "period"} <= self._fields.keys() else ()
        for name in names:
            if not typed_rates.is_rate(cells.get(name, "")):
                continue
            text, typed_period = cells[name], cells.get("period", "")
            try:
                permits, period = typed_rates.rate(text)
            except Mistyped as error:
                raise ValidationError({name: mistyped(error)}) from error
            try:
                contradicts = bool(typed_period) and seconds(typed_period) != period
            except ValidationError as error:
                raise ValidationError({"period": error}) from error
            if contradicts:
                message = _("The rate %(rate)s contains a period: empty this field, or write the rate as a number.")
                raise ValidationError({"period": message % {"rate": text}})
            cells = {**cells, name: f"{permits:f}", "period": f"{period:f}"}
        return cells

    def _value(self, name: str, text: str) -> Any:
        value = self._fields[name].clean(text)
        if name == "key":
            return canonical_key(value)
        if name != "plan":
            return value
        if not value:
            return None
        plan = self._known.plans.get(value)
        if plan is None:
            # Name at most 20 plans, so that the message stays short.
            slugs = ", ".join(sorted(self._known.plans)[:20]) or "–"
            message = _("There is no plan with the slug “%(slug)s”. These slugs exist: %(known)s.")
            raise ValidationError(message % {"slug": value, "known": slugs})
        return plan


def _form_field(table: FileTable, name: str) -> forms.Field:
    column: Any = table.model._meta.get_field(name)
    if isinstance(column, ForeignKey):  # A plan is written as its slug.
        return forms.CharField(required=not column.null)
    field: forms.Field = typed_formfield(column)
    if isinstance(field, TypedNumber | SecondsFormField):
        field.notation = PLAIN  # A file has no language: its numbers are written as an export writes them.
    if name in ("valid_from", "valid_until"):
        field.error_messages["invalid"] = _(
            "Write a moment such as 2026-12-01T00:00:00+00:00, or leave the cell empty."
        )
    elif column.choices:
        choices = ", ".join(str(value) for value, _label in column.flatchoices if value)
        message = _("Write one of these words, or leave the cell empty: %(known)s.")
        field.error_messages["invalid_choice"] = message % {"known": choices}
    return field


class LineState(StrEnum):
    """The effect of a line."""

    ERROR = "error"
    CHANGED = "changed"
    NEW = "new"
    UNCHANGED = "unchanged"


class FieldChange(NamedTuple):
    """A field that a line would change. `before` and `after` are the field's values as texts."""

    field: str
    before: str
    after: str


@dataclass(slots=True)
class ComparedLine:
    """A line and its effect.

    number    the number that a text editor shows for the line
    name      the key or the account of the row, and its rule if it has one. If the line has a wrong number of cells:
              the beginning of the line
    stored    the row that the line changes, as the database has it; None for a new row
    row       the row as it will be after the import
    changes   the fields that the import changes
    """

    number: int
    name: str
    state: LineState = LineState.ERROR
    stored: Any = None
    row: Any = None
    changes: list[FieldChange] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def fail(self, *errors: str) -> None:
        """Add errors to the line. A line with errors is not imported."""
        self.state = LineState.ERROR
        self.errors.extend(error for error in errors if error not in self.errors)


def compare(table: FileTable, source: Source, using: str) -> Iterator[list[ComparedLine]]:
    """Yield the lines of a file in portions. Each line has its effect. `using` is the database of the rows.

    The caller is allowed to write a portion before it takes the next one, because no identity is in two portions.
    """
    return _Comparison(table, source, using).portions()


class _Comparison:
    """Compares the lines of a file. Data that all portions need is read only once."""

    def __init__(self, table: FileTable, source: Source, using: str) -> None:
        self.table, self.source, self.using = table, source, using
        self.now = moments.now()
        self.known = PlansAndRules.read(using)
        self.cells = Cells(table, self.known)
        self.identity_columns = [source.columns.index(name) for name in table.identity]
        #: The overrides of earlier lines that give a rule a mode, or do so no longer. Perhaps they are not written.
        self.modes: list[KeyOverride] = []
        #: The text of the first line that adds an account for a customer, by the customer's primary key.
        self.payers: dict[int, str] = {}

    def portions(self) -> Iterator[list[ComparedLine]]:
        groups: dict[tuple[str, ...], list[SourceLine]] = defaultdict(list)
        for line in self.source.lines:
            groups[self._identity(line)].append(line)
        portion: dict[tuple[str, ...], list[SourceLine]] = {}
        count = 0
        for identity, lines in groups.items():
            portion[identity] = lines
            count += len(lines)
            if count >= PORTION:
                yield self._compared_portion(portion)
                portion, count = {}, 0
        if portion:
            yield self._compared_portion(portion)

    def _identity(self, line: SourceLine) -> tuple[str, ...]:
        if line.problem:
            return "", str(line.number)  # No other line has this identity.
        cells = tuple(line.cells[index].strip() for index in self.identity_columns)
        # Two lines can write the same key in different ways.
        return (canonical_key(cells[0]), *cells[1:]) if self.table.identity[0] == "key" else cells

    def _compared_portion(self, groups: dict[tuple[str, ...], list[SourceLine]]) -> list[ComparedLine]:
        stored = self._stored_rows({name for name, *_rest in groups})
        compared = []
        for identity, lines in groups.items():
            compared += self._compared_group(identity, lines, stored.get(identity, []))
        if self.table.model is KeyOverride and len(self.known.rules) > MAX_LIMITS:
            self._fail_crowded(compared)
        if self.table.model is Account:
            self._fail_second_accounts(compared)
        return compared

    def _fail_second_accounts(self, compared: Sequence[ComparedLine]) -> None:
        """Refuse a line that adds an account for a customer who has one already, or gets one by an earlier line."""
        new = {line.row.identifier: line for line in compared if line.state is LineState.NEW}
        customers = customers_of_rows(self.using, new)
        accounts = other_accounts(self.using, customers.keys()) if customers else {}
        for text, customer in sorted(customers.items(), key=lambda each: new[each[0]].number):
            account = accounts.get(text, self.payers.setdefault(customer, text))
            if account != text:
                new[text].fail(str(SecondAccountError(text, account)))

    def _fail_crowded(self, compared: Sequence[ComparedLine]) -> None:
        """Refuse a line with which too many rules could apply to one request, since it switches on a rule."""
        by_key: dict[str, list[ComparedLine]] = defaultdict(list)
        for line in compared:
            if line.state in (LineState.NEW, LineState.CHANGED) and (
                line.row.mode or (line.stored and line.stored.mode)
            ):
                by_key[line.row.key].append(line)
        for key, lines in by_key.items():
            rows = [line.row for line in lines]
            if self._switches_on(rows) and self._crowding_error(key, rows):
                for line in lines:
                    if self._switches_on([line.row]) and (error := self._crowding_error(key, [line.row])):
                        line.fail(error)
                    else:
                        self.modes.append(line.row)
            else:
                self.modes += rows

    def _switches_on(self, rows: Sequence[KeyOverride]) -> bool:
        return any(
            row.mode not in ("", Rule.Mode.OFF)
            and any(rule.mode == Rule.Mode.OFF for rule in self.known.rules.get(row.rule, ()))
            for row in rows
        )

    def _crowding_error(self, key: str, rows: Sequence[KeyOverride]) -> str:
        edited = [*self.modes, *rows]
        return crowding_error(key, edited, KeyOverride.objects.using(self.using), Rule.objects.using(self.using))

    def _stored_rows(self, names: set[str]) -> dict[tuple[str, ...], list[Any]]:
        """Return the stored rows of these keys or account identifiers, by the identity of the row."""
        # No database stores a NUL character. PostgreSQL refuses to search for a text with a NUL character.
        searched = {name for name in names if name and "\0" not in name}
        rows: Any = self.table.model._base_manager.using(self.using).filter(
            **{f"{self.table.identity[0]}__in": searched}
        )
        if "plan" in self.table.columns:
            rows = rows.select_related("plan")
        by_identity: dict[tuple[str, ...], list[Any]] = defaultdict(list)
        for row in rows.order_by("pk"):
            by_identity[tuple(getattr(row, name) for name in self.table.identity)].append(row)
        return by_identity

    def _compared_group(
        self, identity: tuple[str, ...], lines: list[SourceLine], stored: list[Any]
    ) -> list[ComparedLine]:
        """Compare and check all lines with the same identity."""
        compared = [self._compared_line(" · ".join(identity), line, stored) for line in lines]
        if len(compared) > 1:
            self._fail_duplicates(compared)
        if self.table.dated:
            self._fail_overlaps(compared, stored)
        number_of_wrong_line = next((line.number for line in compared if line.state is LineState.ERROR), None)
        for line in compared:
            if number_of_wrong_line is not None and line.state in (LineState.NEW, LineState.CHANGED):
                text = _("Line %(line)s has the same key and is wrong: correct line %(line)s first.")
                line.fail(text % {"line": number_of_wrong_line})
        return compared

    def _compared_line(self, name: str, line: SourceLine, stored: list[Any]) -> ComparedLine:
        if line.problem:
            # The key is not known, because the line has too many or too few cells. So show the line's first characters.
            return ComparedLine(line.number, " ".join(line.cells)[:60], errors=[line.problem])
        compared = ComparedLine(line.number, name)
        cells = dict(zip(self.source.columns, line.cells, strict=True))
        values, errors = self.cells.values(cells)
        if not errors:
            matching = self._matching(values, stored)
            if len(matching) > 1:
                text = _("%(count)s rows with this key are valid now or later: write the “valid_from” of one of them.")
                errors.append(text % {"count": len(matching)})
            compared.stored = matching[0] if len(matching) == 1 else None
        if errors:
            compared.fail(*errors)
            return compared
        self._fill(compared, cells, values)
        return compared

    def _matching(self, values: dict[str, Any], stored: list[Any]) -> list[Any]:
        """Return the stored rows that a line can mean. These can be several if the file has no column `valid_from`.

        Rows whose end has passed are left out. But if the file has a column `valid_until`, and a row has the same end
        as the line, return only this row, even if its end has passed.
        """
        if not self.table.dated:
            return stored
        rows = [row for row in stored if "valid_from" not in values or row.valid_from == values["valid_from"]]
        if "valid_until" in values:
            same_end = [row for row in rows if row.valid_until == values["valid_until"]]
            if same_end:
                return same_end[-1:]
        return [row for row in rows if row.valid_until is None or row.valid_until > self.now]

    def _fill(self, compared: ComparedLine, cells: dict[str, str], values: dict[str, Any]) -> None:
        """Make the row that a line describes. List the differences between this row and the stored row."""
        stored = compared.stored
        row = compared.row = copy.copy(stored) if stored is not None else self.table.model()
        for name, value in values.items():
            before = getattr(stored, name) if stored is not None else None
            # An export writes a value as a text, and the form can read another value from this text. So a cell that
            # has the text of the export does not change the stored value.
            if stored is not None and (value == before or cells.get(name) == written(before)):
                continue
            setattr(row, name, value)
            if stored is not None or written(value):
                compared.changes.append(FieldChange(name, written(before), written(value)))
        if stored is not None and not compared.changes:
            compared.state = LineState.UNCHANGED
            return
        compared.state = LineState.NEW if stored is None else LineState.CHANGED
        try:
            # `Cells` has checked the plan. To check it here would take a query for each line.
            row.clean_fields(exclude={"plan"})
            self.table.check(row, self.known)
        except ValidationError as error:
            compared.fail(*_sentences(error))

    def _fail_duplicates(self, compared: Sequence[ComparedLine]) -> None:
        """Refuse a line if an earlier line means the same row."""
        first_lines: dict[Any, ComparedLine] = {}
        for line in compared:
            if line.row is None:
                continue
            # A stored row is identified by its primary key, and a new row by its start and its end.
            row_id: Any
            if line.stored is not None:
                row_id = line.stored.pk
            else:
                row_id = tuple(getattr(line.row, name, None) for name in ("valid_from", "valid_until"))
            if other := first_lines.get(row_id):
                line.fail(
                    _("Line %(line)s is about the same row: leave one of the two lines out.") % {"line": other.number}
                )
            else:
                first_lines[row_id] = line

    def _fail_overlaps(self, compared: Sequence[ComparedLine], stored: Sequence[Any]) -> None:
        """Refuse a line if its row and another row would be valid at the same time after the import."""
        lines = {id(line.row): line for line in compared if line.row is not None and line.state is not LineState.ERROR}
        replaced = {line.stored.pk for line in lines.values() if line.stored is not None}
        rows = [line.row for line in lines.values()] + [row for row in stored if row.pk not in replaced]
        for pair in overlaps(rows, self.now):
            for row, other in (pair, pair[::-1]):
                line = lines.get(id(row))
                if line is not None and line.state in (LineState.NEW, LineState.CHANGED):
                    line.fail(_overlap(other, lines.get(id(other))))


def _overlap(other: Any, line: ComparedLine | None) -> str:
    if line is not None and line.state is not LineState.UNCHANGED:
        text = _("This row is valid at the same time as line %(line)s: change the start or the end of one of them.")
        return text % {"line": line.number}
    text = _(
        "This row is valid at the same time as a stored row (%(span)s): end the stored row. Or, to change the stored"
        " row with this line, write the start of the stored row in the cell “valid_from”."
    )
    return text % {"span": _span(other.valid_from, other.valid_until)}


def _span(start: datetime | None, end: datetime | None) -> str:
    return f"{written(start) or '…'} – {written(end) or '…'}"


def _sentences(error: ValidationError) -> list[str]:
    if not hasattr(error, "error_dict"):
        return list(error.messages)
    return [
        message if name == "__all__" else f"{name}: {message}"
        for name, messages in error.message_dict.items()
        for message in messages
    ]
