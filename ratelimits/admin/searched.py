"""Searches in the admin's lists for accounts (by identifier or name) and for keys."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from ratelimits.conf import conf
from ratelimits.models import Account, Name
from ratelimits.models.customers import WAITING
from ratelimits.models.keys import canonical_account
from ratelimits.status.keys import accounts_of_key, typed_key

if TYPE_CHECKING:
    _Base = admin.ModelAdmin[Any]
else:
    _Base = object

#: Maximum number of accounts with the same name that a search finds.
_MAX_NAMED = 50
#: Maximum number of spaces in a term that are tried as the space between account and key. Each try needs queries.
_MAX_SPACES = 20


class Subjects(NamedTuple):
    """What a search term can mean: texts of accounts, accounts that have this name now, and a key of these accounts.

    If `key` is "", all their keys are meant.
    """

    texts: list[str]
    key: str = ""
    named: tuple[str, ...] = ()

    @property
    def accounts(self) -> list[str]:
        """Return the identifiers of all these accounts."""
        return list(dict.fromkeys([*self.texts, *self.named]))

    def customers(self, using: str) -> list[str]:
        """Return the tokens of the customers who have ever had one of the texts, or whose account has the name now.

        The texts can also be tokens. Perhaps some of the returned tokens are of no customer.
        """
        own = Q(identifier__in=self.named, until=None)  # A former customer of the account has another name.
        names = Name.objects.using(using).filter(own | Q(identifier__in=self.texts))
        tokens = [text.strip().lower().removeprefix(WAITING) for text in self.accounts]
        return [*tokens, *names.values_list("customer__token", flat=True)]

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
        return self.subjects(request, text).accounts

    def subjects(self, request: HttpRequest, text: str, key: str = "") -> Subjects:
        """Return the accounts that a text can mean, with a key of these accounts."""
        texts = [text, canonical_account(text)]
        page = self.admin_site._registry.get(Account)
        if page is None or not page.has_view_permission(request):
            return Subjects(texts, key)
        named = Account.objects.using(conf.DATABASE).filter(name__iexact=text).order_by("identifier")
        return Subjects(texts, key, tuple(named.values_list("identifier", flat=True)[:_MAX_NAMED]))

    def meanings(self, request: HttpRequest, term: str) -> Iterator[Subjects]:
        """Yield what a search term can mean: an account; an account, a space and a key; or a key that was used lately.

        An account or a key can also contain spaces. So each of the first `_MAX_SPACES` spaces in the term can be the
        space between account and key, if a key can follow.
        """
        yield self.subjects(request, term)
        spaces = (index for index, letter in enumerate(term) if letter == " ")
        for space in islice(spaces, _MAX_SPACES):
            key = term[space + 1 :]
            if " " not in key or typed_key(key) is not None:
                yield self.subjects(request, term[:space], key)
        used = typed_key(term)
        if used is not None:
            yield Subjects(accounts_of_key(used), used)
