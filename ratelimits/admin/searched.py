"""Searches of the admin's lists for accounts, by identifier or name, and for keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from ratelimits.conf import conf
from ratelimits.models import Account
from ratelimits.status.known_keys import accounts_of_key, typed_key

if TYPE_CHECKING:
    _Base = admin.ModelAdmin[Any]
else:
    _Base = object

#: Maximum number of accounts with one name that a search finds.
_MAX_NAMED = 50


class Meant(NamedTuple):
    """What a search term may mean: some accounts, and one key of them; "" stands for all their keys."""

    accounts: list[str]
    key: str = ""

    @property
    def of_key(self) -> dict[str, str]:
        """Return the filter for the key."""
        return {"key": self.key} if self.key else {}


class AccountSearch(_Base):
    """Mixin for lists with the column `account`: the search is for a whole identifier or name of an account."""

    search_fields = ["account"]  # With this, Django shows a search box. get_search_results does the search.
    search_help_text = _("Search for a whole account: its identifier or its name.")

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Search for the rows of an account."""
        if not search_term:
            return queryset, False
        return queryset.filter(account__in=self.accounts_meant(request, search_term)), False

    def accounts_meant(self, request: HttpRequest, text: str) -> list[str]:
        """Return the identifiers that a text may mean: the text itself, and those of accounts with this name.

        Names are searched only for users who may view accounts.
        """
        page = self.admin_site._registry.get(Account)
        if page is None or not page.has_view_permission(request):
            return [text]
        named = Account.objects.using(conf.DATABASE).filter(name__iexact=text).order_by("identifier")
        return list(dict.fromkeys([text, *named.values_list("identifier", flat=True)[:_MAX_NAMED]]))

    def meant(self, request: HttpRequest, term: str) -> Iterator[Meant]:
        """Yield what a search term may mean: an account; an account, a space and a key; or a key that was used lately.

        Accounts and keys may contain spaces, so each space of the term may be the space between account and key.
        """
        yield Meant(self.accounts_meant(request, term))
        for space in (index for index, letter in enumerate(term) if letter == " "):
            yield Meant(self.accounts_meant(request, term[:space]), term[space + 1 :])
        key = typed_key(term)
        if key is not None:
            yield Meant(accounts_of_key(key), key)
