"""Searches in the admin's lists for accounts (by identifier or name) and for keys."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from ratelimits.conf import conf
from ratelimits.models import Account
from ratelimits.models.keys import canonical_account
from ratelimits.status.known_keys import accounts_of_key, typed_key

if TYPE_CHECKING:
    _Base = admin.ModelAdmin[Any]
else:
    _Base = object

#: Maximum number of accounts with the same name that a search finds.
_MAX_NAMED = 50
#: Maximum number of spaces in a term that are tried as the space between account and key. Each try needs queries.
_MAX_SPACES = 20


class Subjects(NamedTuple):
    """Accounts that a search term can mean, and a key of these accounts. If `key` is "", all their keys are meant."""

    accounts: list[str]
    key: str = ""

    @property
    def key_filter(self) -> dict[str, str]:
        """Return the filter for the key."""
        return {"key": self.key} if self.key else {}


class AccountSearch(_Base):
    """Mixin for lists with the column `account`. Users search for the whole identifier or name of an account."""

    search_fields = ["account"]  # With this, Django shows a search box. get_search_results does the search.
    search_help_text = _("Search for a whole account: its identifier or its name.")

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Search for the rows of an account."""
        if not search_term:
            return queryset, False
        return queryset.filter(account__in=self.possible_accounts(request, search_term)), False

    def possible_accounts(self, request: HttpRequest, text: str) -> list[str]:
        """Return the identifiers of accounts that a text can mean.

        These are the text itself, the identifier in which the text is spelled and, if the user may view accounts, the
        identifiers of accounts with this name.
        """
        texts = [text, canonical_account(text)]
        page = self.admin_site._registry.get(Account)
        if page is None or not page.has_view_permission(request):
            return list(dict.fromkeys(texts))
        named = Account.objects.using(conf.DATABASE).filter(name__iexact=text).order_by("identifier")
        return list(dict.fromkeys([*texts, *named.values_list("identifier", flat=True)[:_MAX_NAMED]]))

    def meanings(self, request: HttpRequest, term: str) -> Iterator[Subjects]:
        """Yield what a search term can mean: an account; an account, a space and a key; or a key that was used lately.

        An account or a key can also contain spaces. So each of the first `_MAX_SPACES` spaces in the term can be the
        space between account and key, if a key can follow.
        """
        yield Subjects(self.possible_accounts(request, term))
        spaces = (index for index, letter in enumerate(term) if letter == " ")
        for space in islice(spaces, _MAX_SPACES):
            key = term[space + 1 :]
            if " " not in key or typed_key(key) is not None:
                yield Subjects(self.possible_accounts(request, term[:space]), key)
        used = typed_key(term)
        if used is not None:
            yield Subjects(accounts_of_key(used), used)
