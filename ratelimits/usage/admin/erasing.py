"""Erase a customer in the admin: an action of accounts, with a page that says what is replaced."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ratelimits.admin.accounts import AccountAdmin
from ratelimits.admin.audited import REASON
from ratelimits.admin.operate.confirming import Consequences, confirmation, is_confirmed
from ratelimits.admin.readonly import OwnTransactions
from ratelimits.models import Account, Customer
from ratelimits.models.customers import customers_now
from ratelimits.usage.admin.moves import MovesNames
from ratelimits.usage.erasure.erase import ErasurePreview, preview
from ratelimits.usage.erasure.everywhere import erase_everywhere

#: The permission to erase a customer.
ERASE = "ratelimits_usage.erase"


class ErasesCustomers(MovesNames, OwnTransactions):
    """Adds to the page of accounts what only a customer with usage needs: to move its texts, and to erase it."""

    def has_erase_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may erase customers."""
        return request.user.has_perm(ERASE)

    @admin.action(description=gettext_lazy("Erase the customer of the selected account"), permissions=["erase"])
    def erase_customer(self, request: HttpRequest, queryset: QuerySet[Account]) -> HttpResponse | None:
        """Show what is replaced. When the user confirms, erase the customer."""
        customers = list(
            Customer.objects.using(queryset.db).filter(
                pk__in=customers_now(queryset.db, list(queryset.values_list("identifier", flat=True)))
            )
        )
        if len(customers) != 1:
            self.message_user(request, _("Choose the account of one customer."), messages.WARNING)
            return None
        found = preview(customers[0])
        if found.archives:
            text = _("Archives have usage of this customer (%(names)s): use the command ratelimits_erase --archive.")
            self.message_user(request, text % {"names": ", ".join(found.archives)}, messages.ERROR)
            return None
        if found.obstacle:
            self.message_user(request, found.obstacle, messages.ERROR)
            return None
        if not is_confirmed(request):
            back = reverse(f"{self.admin_site.name}:ratelimits_account_changelist")
            return confirmation(request, self.admin_site, self.model._meta, _consequences(found), back)
        self._erase(request, found.customer)
        return None

    def _erase(self, request: HttpRequest, customer: Customer) -> None:
        try:
            done = erase_everywhere(customer, by=request.user, why=request.POST.get(REASON, ""))
        except ValueError as error:
            self.message_user(request, str(error), messages.ERROR)
            return
        self.message_user(request, _("Customer %(token)s was erased.") % {"token": customer}, messages.SUCCESS)
        if done.error:
            text = _("Redis still has limits of the customer, until they expire: %(error)s")
            self.message_user(request, text % {"error": done.error}, messages.WARNING)


def _consequences(found: ErasurePreview) -> Consequences:
    return Consequences(
        title=_("Erase customer %(token)s") % {"token": found.customer},
        sentences=[
            _("Account texts: %(texts)s") % {"texts": ", ".join(found.texts)},
            _(
                "These names, the customer's keys and its name become pseudonyms in all tables. All numbers, reports"
                " and invoices stay, and verify as before."
            ),
            _(
                "Overrides, blocks, allows and alert channels of the customer are deleted. Its limits in Redis begin"
                " again."
            ),
        ],
        warnings=[
            _(
                "This cannot be undone. First delete the person in your project: otherwise its next request brings the"
                " names back."
            )
        ],
        heads=[_("what"), _("rows")],
        rows=[(name, f"{count:,}") for name, count in found.rows.items()],
    )


class CustomerAccountAdmin(ErasesCustomers, AccountAdmin):
    """Accounts whose texts can be moved, and whose customers can be erased."""

    search_help_text = gettext_lazy("Search for a part of an identifier or of a name, or for the token of a customer.")
    readonly_fields = [*AccountAdmin.readonly_fields, "customer"]
    actions = ["erase_customer"]

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return the fields. A new account has no customer yet."""
        identifier, *others = super().get_fields(request, obj)
        return [identifier, *others] if obj is None else [identifier, "customer", *others]


# If the project has a page of its own, that page stays.
if type(admin.site._registry.get(Account)) is AccountAdmin:
    admin.site.unregister(Account)
    admin.site.register(Account, CustomerAccountAdmin)
