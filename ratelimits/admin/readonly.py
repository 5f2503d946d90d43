"""Read-only admin pages, for tables that workers write. These tables can be very large."""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ImproperlyConfigured
from django.core.paginator import Paginator
from django.db import transaction
from django.db.models import Model, QuerySet
from django.http import HttpRequest

from ratelimits.admin.typed import ChecksIds, LocalMoments
from ratelimits.conf import conf

if TYPE_CHECKING:
    _Paginator = Paginator[Any]
else:
    _Paginator = Paginator

#: Maximum number of rows that a list counts and shows in pages.
MAX_ROWS = 10_000


def database_of(row: Model) -> str:
    """Return the alias of the database from which a row was read."""
    return row._state.db or conf.DATABASE


class BoundedPaginator(_Paginator):
    """A paginator over the first `MAX_ROWS` rows, because it takes long to count all rows of a large table."""

    @cached_property
    def count(self) -> int:
        rows: Any = self.object_list
        return int(rows.order_by()[:MAX_ROWS].count())


class OwnTransactions(LocalMoments, ChecksIds):
    """An admin page whose actions make their own transactions.

    If the project sets ATOMIC_REQUESTS, Django runs each view in a transaction. But the app can close a period or
    accept a batch only in a transaction that is not inside another transaction. So these views run outside Django's
    transaction.
    """

    @property
    def urls(self) -> Any:
        """Return the URLs of the pages. Django does not wrap the views of these pages in a transaction.

        If DATABASE is not valid, no view can work. But `manage.py check` needs the URLs, so that it can report this.
        """
        patterns = super().urls
        with suppress(ImproperlyConfigured):
            for pattern in patterns:
                transaction.non_atomic_requests(conf.DATABASE)(pattern.callback)
        return patterns


class ReadOnlyAdmin(OwnTransactions):
    """An admin page on which nobody can add, change or delete rows."""

    paginator = BoundedPaginator
    show_full_result_count = False

    class Media:
        css = {"all": ["ratelimits/lists.css"]}

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """If the page's only search field ends with `__exact`, search for the whole term.

        Django itself would search for each word of the term.
        """
        fields = self.get_search_fields(request)
        if search_term and len(fields) == 1 and fields[0].endswith("__exact"):
            return queryset.filter(**{fields[0]: search_term}), False
        return super().get_search_results(request, queryset, search_term)

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return the page's `fields`.

        If `fields` is empty, return all editable columns that are not in `exclude`. Then add the
        `readonly_fields` that are still missing.
        """
        if self.fields:
            return self.fields
        names = (field.name for field in self.model._meta.concrete_fields if field.editable)
        columns = [name for name in names if name not in (self.exclude or ())]
        return [*columns, *(str(name) for name in self.readonly_fields if name not in columns)]
