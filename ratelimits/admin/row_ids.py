"""Read the ids of rows that a URL or a form names. No text from outside reaches the database as an id unchecked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import ValidationError
from django.http import Http404, HttpRequest

if TYPE_CHECKING:
    from django.db.models import QuerySet

    _Base = admin.ModelAdmin[Any]
else:
    _Base = admin.ModelAdmin


def primary_key(model: Any, text: str) -> Any:
    """Return the primary key of a model that a text names. Raise Http404 if the text cannot be one.

    SQLite raises OverflowError for a number that it cannot store, and Python for one with more than 4,300 digits.
    """
    try:
        return model._meta.pk.clean(text, None)
    except (ValidationError, ValueError) as error:
        raise Http404 from error


class ChecksIds(_Base):
    """An admin page whose actions answer 404 if a form names an id that no row can have."""

    def response_action(self, request: HttpRequest, queryset: QuerySet[Any], *args: Any, **kwargs: Any) -> Any:
        for text in request.POST.getlist(ACTION_CHECKBOX_NAME):
            primary_key(self.model, text)
        return super().response_action(request, queryset, *args, **kwargs)
