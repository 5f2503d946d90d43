"""The column of a moment."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from django import forms
from django.db import models
from django.db.models.query_utils import DeferredAttribute

from ratelimits import moments

if TYPE_CHECKING:
    _Base = models.DateTimeField[Any, Any]
else:
    _Base = models.DateTimeField


class _Moment(DeferredAttribute):
    """The attribute of a row: a datetime without a time zone becomes a moment when it is assigned."""

    def __set__(self, row: Any, value: Any) -> None:
        row.__dict__[self.field.attname] = moments.read(value) if isinstance(value, datetime) else value


class LocalDateTimeInput(forms.DateTimeField):
    """An input for a moment. People read and type a local time."""

    def to_python(self, value: Any) -> Any:
        value = super().to_python(value)
        return moments.typed(value) if isinstance(value, datetime) else value

    def prepare_value(self, value: Any) -> Any:
        return super().prepare_value(moments.untyped(value) if isinstance(value, datetime) else value)


class LocalSplitDateTimeInput(forms.SplitDateTimeField):
    """The same with two inputs, for a date and a time."""

    def compress(self, data_list: Any) -> Any:
        value = super().compress(data_list)
        return moments.typed(value) if isinstance(value, datetime) else value

    def prepare_value(self, value: Any) -> Any:
        return super().prepare_value(moments.untyped(value) if isinstance(value, datetime) else value)

    def has_changed(self, initial: Any, data: Any) -> bool:
        return super().has_changed(moments.untyped(initial) if isinstance(initial, datetime) else initial, data)


#: The app's inputs, by the inputs of Django that they replace. Django's own show UTC if `USE_TZ` is False.
_INPUTS: dict[Any, Any] = {
    forms.DateTimeField: LocalDateTimeInput,
    forms.SplitDateTimeField: LocalSplitDateTimeInput,
}


class UTCDateTimeField(_Base):
    """A DateTimeField that stores UTC, and whose values are aware datetimes, also with `USE_TZ=False`.

    Without this, a project with `USE_TZ=False` would store local times. In the hour in which the clocks are put back, a
    local time names two moments. And if `USE_TZ` or TIME_ZONE changed later, all stored moments would shift.
    """

    descriptor_class = _Moment

    def pre_save(self, model_instance: Any, add: bool) -> Any:
        if self.auto_now or (self.auto_now_add and add):
            value = moments.now()
            setattr(model_instance, self.attname, value)
            return value
        return super().pre_save(model_instance, add)

    def to_python(self, value: Any) -> Any:
        value = super().to_python(value)
        return moments.read(value) if isinstance(value, datetime) else value

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        if not prepared:
            value = self.get_prep_value(value)
        if isinstance(value, datetime) and value.tzinfo is not None and not connection.features.supports_timezones:
            value = value.astimezone(UTC).replace(tzinfo=None)
        return connection.ops.adapt_datetimefield_value(value)

    def from_db_value(self, value: datetime | None, _expression: Any, connection: Any) -> datetime | None:
        if value is None:
            return None
        if not connection.features.supports_timezones:
            # The column has UTC. If Django has added a time zone, it is the connection's.
            return value.replace(tzinfo=UTC)
        if value.tzinfo is None:
            # With USE_TZ=False, Django leaves the time zone of the connection out. `fold` is still there.
            value = value.replace(tzinfo=ZoneInfo(connection.timezone_name))
        return value.astimezone(UTC)

    def formfield(self, **kwargs: Any) -> Any:
        chosen = kwargs.get("form_class", forms.DateTimeField)
        return super().formfield(**{**kwargs, "form_class": _INPUTS.get(chosen, chosen)})
