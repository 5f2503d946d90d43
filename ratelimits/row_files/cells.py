"""Read the cells of a line with the fields of a form.

So a cell accepts the same texts as the field in the admin's form, except for a plan, which is written as its slug. Most
messages are the same too.
"""

from __future__ import annotations

from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from django.db.models import ForeignKey
from django.utils.translation import gettext as _

from ratelimits.algorithms import typed_rates
from ratelimits.algorithms.typed_numbers import PLAIN, Mistyped
from ratelimits.models.fields.durations import SecondsFormField, seconds
from ratelimits.models.fields.numbers import TypedNumber, mistyped, typed_formfield
from ratelimits.models.keys import canonical_key
from ratelimits.row_files.tables import FileTable, PlansAndRules


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
