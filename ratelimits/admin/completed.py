"""Choices that are completed while they are typed, and that can be made without JavaScript too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.contrib.admin.widgets import AutocompleteSelect
from django.forms import Select
from django.http import HttpRequest

if TYPE_CHECKING:
    _Base = admin.ModelAdmin[Any]
else:
    _Base = object

#: Maximum number of choices that a page lists for those without JavaScript.
MAX_LISTED = 500


class ListedAutocomplete(AutocompleteSelect):
    """Django's completed select, which lists its choices as well if there are few: without JavaScript it is a select.

    Django's own has only the chosen one, so nothing else could be chosen without JavaScript.
    """

    def optgroups(self, name: str, value: Any, attrs: Any = None) -> Any:
        queryset: Any = self.choices.queryset
        if queryset[: MAX_LISTED + 1].count() > MAX_LISTED:
            return super().optgroups(name, value, attrs)
        return Select.optgroups(self, name, value, attrs)


class Completed(_Base):
    """Mixin for admin pages with `autocomplete_fields`: completed for those who may view the rows, else a select."""

    def get_autocomplete_fields(self, request: HttpRequest) -> Any:
        return [name for name in super().get_autocomplete_fields(request) if self._may_view(name, request)]

    def _may_view(self, name: str, request: HttpRequest) -> bool:
        related: Any = self.model._meta.get_field(name).related_model
        page = self.admin_site._registry.get(related)
        return page is not None and page.has_view_permission(request)

    def formfield_for_foreignkey(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        if db_field.name in self.get_autocomplete_fields(request):
            kwargs.setdefault("widget", ListedAutocomplete(db_field, self.admin_site, using=kwargs.get("using")))
        return super().formfield_for_foreignkey(db_field, request, **kwargs)
