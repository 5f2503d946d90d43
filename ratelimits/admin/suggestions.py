"""Inputs with autocompletion for admin pages. These inputs also work without JavaScript."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin
from django.contrib.admin.widgets import AutocompleteSelect
from django.db.models import Field
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from ratelimits.admin.inspected import may_inspect

if TYPE_CHECKING:
    _Base = admin.ModelAdmin[Any]
else:
    _Base = object

#: Maximum number of choices that a page lists for browsers without JavaScript.
MAX_LISTED = 500


class ListedAutocomplete(AutocompleteSelect):
    """A select with autocompletion. If there are at most `MAX_LISTED` choices, the select lists all of them.

    Django's own select with autocompletion lists only the current choice. So a user without JavaScript could choose
    nothing else.
    """

    def optgroups(self, name: str, value: Any, attrs: Any = None) -> Any:
        queryset: Any = self.choices.queryset
        if queryset[: MAX_LISTED + 1].count() > MAX_LISTED:
            return super().optgroups(name, value, attrs)
        return forms.Select.optgroups(self, name, value, attrs)


class KeyInput(forms.TextInput):
    """A text input that suggests known keys. `url` is the URL of the inspector's search.

    Without JavaScript, the input makes no suggestions.
    """

    def __init__(self, url: str, attrs: dict[str, Any] | None = None) -> None:
        # Without autocomplete="off", the browser would show earlier inputs in front of the suggestions.
        super().__init__({"autocomplete": "off", **(attrs or {}), "data-ratelimits-keys": url})

    class Media:
        js = ["ratelimits/keys.js"]

    def render(self, name: str, value: Any, attrs: dict[str, Any] | None = None, renderer: Any = None) -> SafeString:
        list_id = f"{(attrs or {}).get('id', name)}_keys"
        text_input = super().render(name, value, {**(attrs or {}), "list": list_id}, renderer)
        return format_html('{}<datalist id="{}"></datalist>', text_input, list_id)


def suggest_keys(field: Any, site: str, kind: str) -> None:
    """Let the input of a form's field suggest known keys, or known accounts.

    `kind` is "keys" or "accounts". `site` is the name of the admin site.
    """
    field.widget = KeyInput(reverse(f"{site}:ratelimits_inspect_{kind}"), field.widget.attrs)


class KeySuggestions(_Base):
    """Mixin for admin pages with inputs for keys or accounts.

    If the user may open the inspector, these inputs suggest known keys and known accounts.

    key_fields      the names of the fields for keys
    account_fields  the names of the fields for identifiers of accounts
    """

    key_fields: tuple[str, ...] = ("key",)
    account_fields: tuple[str, ...] = ()

    def formfield_for_dbfield(self, db_field: Field[Any, Any], request: HttpRequest | None, **kwargs: Any) -> Any:
        field = super().formfield_for_dbfield(db_field, request, **kwargs)  # type: ignore[arg-type]
        if field is not None and request is not None and may_inspect(request):
            for kind, names in (("keys", self.key_fields), ("accounts", self.account_fields)):
                if db_field.name in names:
                    suggest_keys(field, self.admin_site.name, kind)
        return field


class RowSuggestions(_Base):
    """Mixin for admin pages with `autocomplete_fields`.

    A field has autocompletion only if the user may view the rows that can be chosen.
    """

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
