"""The page that moves an account text to another customer, and the customer of an account with its moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.widgets import AdminSplitDateTime
from django.core.exceptions import PermissionDenied
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ratelimits import moments
from ratelimits.admin.audited import REASON, recorded_user
from ratelimits.admin.inspected import may_inspect
from ratelimits.admin.operate.confirming import Consequences, confirmation, is_confirmed
from ratelimits.admin.suggestions import suggest_keys
from ratelimits.admin.typed import local_time
from ratelimits.conf import conf
from ratelimits.engine.keys import LONGEST_NAME
from ratelimits.models import Account, Customer, Move, Name
from ratelimits.models.accounts.named import accounts_now
from ratelimits.models.customers import WAITING, customers_of_rows, is_waiting, waiting_token
from ratelimits.models.keys import canonical_account
from ratelimits.moments.columns import LocalSplitDateTimeInput
from ratelimits.usage.customers import wording
from ratelimits.usage.customers.move import MAX_REASON, ChangedMeanwhileError, move
from ratelimits.usage.customers.planning import NotMovedError, Planned, find_customer, plan, shown

if TYPE_CHECKING:
    _Base = admin.ModelAdmin[Any]
else:
    _Base = object

#: Maximum number of moves, and of names, that a page lists.
_MAX_LISTED = 50
#: The latest quarter that the form accepts (s since 1970 UTC, in the year 5138).
_MAX_QUARTER = 10**11
#: Names of two hidden inputs of the page that asks for confirmation: the quarter from which on the text is moved, and
#: the digest of the move that the page shows.
QUARTER, SEEN = "quarter", "_seen"
_NEW, _EXISTING = "new", "existing"
_NEXT, _SINCE, _ALWAYS = "next", "since", "always"


class MoveForm(forms.Form):
    """The form that asks which text goes to whom, from when on, and why."""

    required_css_class = "required"
    text = forms.CharField(
        label=gettext_lazy("Account text"),
        max_length=LONGEST_NAME,
        strip=False,
        help_text=gettext_lazy("The identifier of the account, as RATELIMITS['ACCOUNT'] returns it."),
    )
    to = forms.ChoiceField(
        label=gettext_lazy("Goes to"),
        widget=forms.RadioSelect,
        choices=[(_EXISTING, gettext_lazy("a customer who exists")), (_NEW, gettext_lazy("a new customer"))],
        initial=_EXISTING,
    )
    customer = forms.CharField(
        label=gettext_lazy("Customer"),
        max_length=LONGEST_NAME,
        required=False,
        strip=False,
        help_text=gettext_lazy("Only for a customer who exists: one of its account texts, or its token."),
    )
    when = forms.ChoiceField(
        label=gettext_lazy("Which usage"),
        widget=forms.RadioSelect,
        choices=[
            (_NEXT, gettext_lazy("from the next quarter of an hour on")),
            (_SINCE, gettext_lazy("from an earlier moment on")),
            (_ALWAYS, gettext_lazy("since its first usage: all usage that the text has ever had")),
        ],
        initial=_NEXT,
    )
    since = LocalSplitDateTimeInput(
        label=gettext_lazy("Since"),
        required=False,
        widget=AdminSplitDateTime,
        help_text=gettext_lazy("A full quarter of an hour, such as 10:15."),
    )
    reason = forms.CharField(label=gettext_lazy("Reason"), max_length=MAX_REASON)
    quarter = forms.IntegerField(widget=forms.HiddenInput, required=False, min_value=0, max_value=_MAX_QUARTER)

    def __init__(self, data: Any, *, may_adjust: bool, initial: dict[str, Any] | None = None) -> None:
        super().__init__(data, initial=initial)
        self._may_adjust = may_adjust
        #: What the move would do; None if it is not possible.
        self.planned: Planned | None = None

    def clean(self) -> dict[str, Any]:
        """Find what the move would do. If it is not possible, show the reason above the form."""
        data: dict[str, Any] = super().clean() or {}
        if data.get("to") == _EXISTING and not data.get("customer") and "customer" not in self.errors:
            self.add_error("customer", _("Write a text or the token of the customer."))
        if data.get("to") == _NEW and data.get("customer"):
            self.add_error("customer", _("Leave this empty for a new customer."))
        since = self._since(data)
        if not self.errors:
            try:
                customer = None if data["to"] == _NEW else find_customer(conf.DATABASE, data["customer"])
                planned = plan(conf.DATABASE, data["text"], customer, since)
                if planned.adjusted and not self._may_adjust:
                    text = _("You may not add adjustments, which this needs: choose %(since)s or a later moment.")
                    raise NotMovedError(text % {"since": shown(planned.since)})
            except NotMovedError as error:
                self.add_error(None, str(error))
            else:
                if planned.changes_nothing:
                    self.add_error(None, _("The customer has this text already: there is nothing to move."))
                self.planned = planned
        return data

    def _since(self, data: dict[str, Any]) -> int | None:
        """Return the quarter that the page has shown, or else the chosen one; None for the next one."""
        if data.get(QUARTER) is not None:
            return int(data[QUARTER])
        moment: datetime | None = data.get("since")
        if data.get("when") == _SINCE and moment is not None:
            return int(moment.timestamp())
        if data.get("when") == _SINCE and "since" not in self.errors:
            self.add_error("since", _("Write the moment."))
        elif moment is not None:
            self.add_error("since", _("Choose “from an earlier moment on”, or leave this empty."))
        return 0 if data.get("when") == _ALWAYS else None


class MoveView:
    """The page that asks for a move, shows its effect, and moves the text when the user confirms."""

    def __init__(self, site: admin.AdminSite, log: Callable[[HttpRequest, Any, str], Any]) -> None:
        self._site, self._log = site, log

    def page(self, request: HttpRequest) -> HttpResponse:
        """Return the response to a request for the page."""
        may_adjust = request.user.has_perm("ratelimits_billing.add_adjustment")
        if request.method != "POST":
            initial = {name: request.GET[name] for name in ("text", "customer") if request.GET.get(name)}
            return self._form_page(request, MoveForm(None, may_adjust=may_adjust, initial=initial))
        form = MoveForm(request.POST, may_adjust=may_adjust)
        if not form.is_valid() or form.planned is None:
            return self._form_page(request, form)
        if is_confirmed(request):
            try:
                return self._move(request, form, form.planned)
            except NotMovedError as error:
                form.add_error(None, str(error))
                return self._form_page(request, form)
            except ChangedMeanwhileError:
                messages.warning(request, _("Nothing was moved, since the effect has changed. Look at it again."))
        return self._confirmation(request, form.planned)

    def _confirmation(self, request: HttpRequest, planned: Planned) -> HttpResponse:
        """Show the effect. The user confirms exactly this text, this customer and this quarter of an hour."""
        values: Any = request.POST.copy()
        values["text"], values[QUARTER], values[SEEN] = planned.text, str(planned.asked), planned.digest
        if planned.customer is not None:
            values["customer"] = planned.customer.token
        request.POST = values
        consequences = Consequences(
            wording.title(planned),
            [*wording.sentences(planned), _("Reason: %s") % values["reason"]],
            list(wording.warnings(planned)),
            heads=wording.heads(),
            rows=wording.rows(planned),
        )
        return confirmation(request, self._site, Account._meta, consequences, self._list_url())

    def _move(self, request: HttpRequest, form: MoveForm, planned: Planned) -> HttpResponse:
        values: Any = request.POST.copy()
        values[REASON] = form.cleaned_data["reason"]
        request.POST = values  # the histories of the account rows get the same reason
        with recorded_user(request):
            made = move(
                planned.text,
                planned.customer,
                planned.asked,
                by=request.user,
                reason=form.cleaned_data["reason"],
                seen=request.POST.get(SEEN, ""),
            )
        said = {"text": made.text, "customer": made.customer, "since": shown(made.since), "reason": made.reason}
        row = accounts_now(conf.DATABASE, [made.text]).get(made.text)
        logged = _("Moved to customer %(customer)s from %(since)s on: %(reason)s") % said
        self._log(request, made if row is None else row, logged)
        messages.success(request, _("Moved: %(text)s is a text of customer %(customer)s from %(since)s on.") % said)
        if made.adjusted_since is not None and conf.ADJUSTMENT_APPROVAL:
            text = _("Reports do not include the adjustments until another person has approved them.")
            messages.warning(request, text)
        if row is None:
            return HttpResponseRedirect(self._list_url())
        return HttpResponseRedirect(reverse(f"{self._site.name}:ratelimits_account_change", args=[row.pk]))

    def _list_url(self) -> str:
        return reverse(f"{self._site.name}:ratelimits_account_changelist")

    def _form_page(self, request: HttpRequest, form: MoveForm) -> HttpResponse:
        if may_inspect(request):
            suggest_keys(form.fields["text"], self._site.name, "accounts")
            suggest_keys(form.fields["customer"], self._site.name, "accounts")
        zone = _("In the time zone %(zone)s.") % {"zone": moments.zone_name()}
        form.fields["since"].help_text = f"{form.fields['since'].help_text} {zone}"
        context = {
            **self._site.each_context(request),
            "title": _("Move a name to another customer"),
            "form": form,
            "media": form.media,
            "opts": Account._meta,
            "back": self._list_url(),
        }
        return TemplateResponse(request, "ratelimits/admin/move_name.html", context)


class MovesNames(_Base):
    """Mixin for the admin page of accounts: a page moves an account text, and the account's page shows its customer."""

    def get_urls(self) -> list[URLPattern]:
        """Return the URLs. The page comes first, because Django's last URL pattern matches every path."""
        view = self.admin_site.admin_view(self.move_view)
        return [path("move/", view, name="ratelimits_account_move"), *super().get_urls()]

    def move_view(self, request: HttpRequest) -> HttpResponse:
        """Show the page that moves a text."""
        if not self.has_change_permission(request):
            raise PermissionDenied
        return MoveView(self.admin_site, self.log_change).page(request)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Return the accounts that fit the search. Each text of a customer, and its token, finds its account."""
        found, may_repeat = super().get_search_results(request, queryset, search_term)
        if typed := search_term.strip():
            rows = accounts_now(conf.DATABASE, [canonical_account(typed), f"{WAITING}{typed.lower()}"]).values()
            found |= queryset.filter(pk__in=[row.pk for row in rows])
        return found, may_repeat

    def is_before_move(self, pk: Any, history_id: Any) -> bool:
        """Return whether a record is older than a move of the account's text, which is perhaps another's now."""
        record = Account.history.filter(id=pk, history_id=history_id).first()
        if record is not None:
            owner = customers_of_rows(conf.DATABASE, [record.identifier]).get(record.identifier)
            if owner != record.customer_id:
                return True
        return bool(super().is_before_move(pk, history_id))  # type: ignore[misc]

    def delete_model(self, request: HttpRequest, obj: Account) -> None:
        """Delete the account, and say that its customer keeps its text."""
        super().delete_model(request, obj)
        self._say_kept(request)

    def delete_queryset(self, request: HttpRequest, queryset: Any) -> None:
        """Delete the accounts, and say that their customers keep their texts."""
        super().delete_queryset(request, queryset)
        self._say_kept(request)

    def _say_kept(self, request: HttpRequest) -> None:
        text = _(
            "The customers of deleted accounts keep their texts, their usage and their bills. To give such a text to"
            " somebody else, move it."
        )
        messages.info(request, text)

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Show links above the form: to move the account's text, and to give another text to its customer."""
        row = kwargs.get("obj")
        if row is not None and self.has_change_permission(request, row):
            page = reverse(f"{self.admin_site.name}:ratelimits_account_move")
            waits = is_waiting(row.identifier)
            if not waits:
                context["move_url"] = f"{page}?{urlencode({'text': row.identifier})}"
            customer = waiting_token(row.identifier) if waits else row.identifier
            context["rename_url"] = f"{page}?{urlencode({'customer': customer})}"
        return super().render_change_form(request, context, *args, **kwargs)

    @admin.display(description=gettext_lazy("customer"))
    def customer(self, account: Account) -> str:
        """Return the customer whom the account is about, with its texts and their moves, as HTML."""
        found = customer_of(account)
        if found is None:
            return "–"
        names = Name.objects.using(conf.DATABASE).filter(customer=found).order_by("identifier", "since")
        moves = Move.objects.using(conf.DATABASE).filter(Q(former=found) | Q(customer=found))
        moves = moves.select_related("former", "customer").prefetch_related("by")
        return format_html(
            "<p>{}</p>{}{}",
            found.token,
            _listed(map(_name_text, names[:_MAX_LISTED])),
            _listed(_move_text(made, found) for made in moves[:_MAX_LISTED]),
        )


def customer_of(account: Account) -> Customer | None:
    """Return the customer whom an account's row is about; None if it has none."""
    if is_waiting(account.identifier):
        return Customer.objects.using(conf.DATABASE).filter(token=waiting_token(account.identifier)).first()
    name = Name.objects.using(conf.DATABASE).filter(identifier=account.identifier, until=None).first()
    return None if name is None else name.customer


def _listed(items: Iterable[str]) -> str:
    listed: Sequence[tuple[str]] = [(item,) for item in items]
    return format_html("<ul>{}</ul>", format_html_join("", "<li>{}</li>", listed)) if listed else ""


def _name_text(name: Name) -> str:
    values = {"text": name.identifier, "since": shown(name.since), "until": shown(name.until or 0)}
    if name.until is None:
        return _("%(text)s since %(since)s") % values if name.since else _("%(text)s, always") % values
    return _("%(text)s from %(since)s until %(until)s") % values


def _move_text(made: Move, customer: Customer) -> str:
    values = {
        "text": made.text,
        "kind": made.get_kind_display(),
        "other": made.former.token if made.customer == customer else made.customer.token,
        "since": shown(made.since),
        "when": local_time(made.at),
        "by": made.by or "–",
        "reason": made.reason or "–",
    }
    if made.customer == customer:
        text = _("%(when)s, %(by)s: got %(text)s of %(other)s from %(since)s on (%(kind)s): %(reason)s")
    else:
        text = _("%(when)s, %(by)s: lost %(text)s to %(other)s from %(since)s on (%(kind)s): %(reason)s")
    return text % values
