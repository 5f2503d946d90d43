"""Links to the inspector from admin pages whose rows belong to a key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from django.contrib import admin
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _

from ratelimits.status.additions import registered
from ratelimits.status.operating import NO_ACCOUNT

if TYPE_CHECKING:
    _Base = admin.ModelAdmin[Any]
else:
    _Base = object

#: Name of an attribute of the request. The attribute has the rows that the page of the list shows.
_LISTED = "_ratelimits_listed"


def may_inspect(request: HttpRequest) -> bool:
    """Return whether the user may open the inspector."""
    user: Any = request.user
    return bool(user.has_perm("ratelimits.view_inspect"))


def inspect_url(key: str, account: str = "", site: str = "admin", at: str = "") -> str:
    """Return the URL of the inspector's page about a key.

    `account` is the account that used the key; "" if the account is not known. `site` is the name of the admin site.
    `at` is the moment for which the user asks, as it was typed.
    """
    query = {"q": key} | ({"account": account} if account else {}) | ({"at": at} if at else {})
    return f"{reverse(f'{site}:ratelimits_inspect_changelist')}?{urlencode(query)}"


class InspectedAdmin(_Base):
    """An admin page whose rows have links to the inspector, in the list and on each row's page.

    In the list, the values of the column `inspected_column` are the links. If `inspected_column` is "", the list gets
    an additional column with the links. A subclass that overrides `get_list_display` must call `inspect_columns` there.

    If `refused_column` is True, the list gets a column with the number of refused requests in 24 hours, if they are
    counted. One query reads the numbers of all rows of the page. Only users who may view ledger lines see this column.
    """

    inspected_column = ""
    refused_column = False
    change_form_template = "ratelimits/admin/inspected_change_form.html"

    def inspected(self, row: Any) -> tuple[str, str]:
        """Return the key that a row is about, and the account of this key; "" for a key or account that is unknown."""
        raise NotImplementedError

    def get_list_display(self, request: HttpRequest) -> list[Any]:
        """Return the columns. If the user may open the inspector, one column has links to it."""
        columns: list[Any] = list(super().get_list_display(request))
        links = self.inspect_columns(request)
        columns += (column for added in registered for column in added.columns(self, request))
        if links and self.inspected_column:
            return [links[0] if name == self.inspected_column else name for name in columns]
        return [*columns, *links]

    def listed(self, request: HttpRequest) -> list[Any]:
        """Return the rows that the page of the list shows; an empty list before it has read them."""
        return list(getattr(request, _LISTED, ()))

    def account_and_key(self, row: Any) -> tuple[str, str]:
        """Return the account and the key of a row. The account is "" if it is unknown, or if there is no account."""
        key, account = self.inspected(row)
        return "" if account == NO_ACCOUNT else account, key

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        """Return the list, and store the rows of its page in the request. A column can then read all rows at once."""
        changelist: Any = super().get_changelist_instance(request)
        setattr(request, _LISTED, changelist.result_list)
        return changelist

    def inspect_columns(self, request: HttpRequest) -> list[Any]:
        """Return a list with the column of links. If the user may not open the inspector, return an empty list."""
        if not may_inspect(request):
            return []
        name = self.inspected_column

        @admin.display(description=self.model._meta.get_field(name).verbose_name if name else _("inspect"))
        def inspect(row: Any) -> str:
            key, account = self.inspected(row)
            if not key:
                return str(getattr(row, name)) if name else "–"
            text = str(getattr(row, name)) if name else _("Inspect")
            return format_html('<a href="{}">{}</a>', inspect_url(key, account, self.admin_site.name), text)

        return [inspect]

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Show a link to the inspector above the form of an existing row."""
        row = kwargs.get("obj")
        key, account = self.inspected(row) if row is not None and may_inspect(request) else ("", "")
        context["inspect_url"] = inspect_url(key, account, self.admin_site.name) if key else ""
        return super().render_change_form(request, context, *args, **kwargs)
