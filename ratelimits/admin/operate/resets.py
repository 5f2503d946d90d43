"""Resets in the admin. A reset gives a key all permits of a rule again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied, ValidationError
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ratelimits.admin.inspected import may_inspect
from ratelimits.admin.operate.chosen_key import ChosenKey, KeyQuestion, ask_for_key, chosen_key, keys_of
from ratelimits.admin.operate.confirming import Consequences, confirmation, is_confirmed, may_operate
from ratelimits.admin.operate.grants import first_choice, rule_field
from ratelimits.admin.operate.offered import OfferedRule, offered_rules
from ratelimits.admin.readonly import ReadOnlyAdmin
from ratelimits.models import KeyReset
from ratelimits.quota.standings import UNAVAILABLE
from ratelimits.rules import RulesUnavailable
from ratelimits.status.operating import NothingDoneError, counted_under, reset


class KeyResetForm(forms.Form):
    """A form that asks for the rule and the reason."""

    required_css_class = "required"
    rule = rule_field()
    reason = forms.CharField(label=gettext_lazy("Reason"), max_length=200)

    def __init__(self, data: Any, key: ChosenKey, offered: Sequence[OfferedRule], wanted: str) -> None:
        super().__init__(data)
        self.standings: list[Any] = []
        self._key = key
        rule = self.fields["rule"]
        assert isinstance(rule, forms.ChoiceField)
        rule.choices = [(one.name, one.label) for one in offered]
        rule.initial = first_choice(offered, wanted)

    def clean(self) -> dict[str, Any]:
        """Read how many permits the key has left. If this fails, show the error above the form."""
        data: dict[str, Any] = super().clean() or {}
        if not self.errors:
            try:
                self.standings = counted_under(self._key.key, data["rule"], self._key.account)
            except (NothingDoneError, ValidationError) as error:
                self.add_error(None, str(error) if isinstance(error, NothingDoneError) else error)
            except UNAVAILABLE as error:
                self.add_error(None, _("Redis or the database does not answer: %s") % error)
        return data


@admin.register(KeyReset)
class KeyResetAdmin(ReadOnlyAdmin):
    """The resets that users have made, and the form for a new reset."""

    list_display = ["key", "rule", "account", "reason", "made_by", "at"]
    search_fields = ["key", "reason"]
    fields = ["key", "account", "rule", "reason", "made_by", "at"]
    readonly_fields = ["made_by", "at"]

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return may_operate(request) or super().has_view_permission(request, obj)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return may_operate(request)

    def get_queryset(self, request: HttpRequest) -> Any:
        """Return the resets with their users. A separate query reads the users: they may be in another database."""
        return super().get_queryset(request).prefetch_related("by")

    @admin.display(description=gettext_lazy("by"))
    def made_by(self, row: KeyReset) -> str:
        """Return the user who made the reset."""
        return str(row.by or "–")

    def add_view(
        self, request: HttpRequest, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Ask for the key, and then for the rule. Reset the key after the user has confirmed the consequences."""
        if not may_operate(request):
            raise PermissionDenied
        back = reverse(f"{self.admin_site.name}:ratelimits_keyreset_changelist")
        found = chosen_key(request, self.admin_site)
        offered: list[OfferedRule] = []
        if isinstance(found, ChosenKey):
            try:
                offered = [rule for rule in offered_rules(found.identity, found.key) if rule.counts_key_itself]
            except RulesUnavailable as error:
                found = KeyQuestion(_("The rules cannot be read: %s") % error)
            else:
                if not offered:
                    text = _(
                        "No rule counts %s as one key, so there is nothing to reset. Reset one of its keys instead."
                    )
                    found = KeyQuestion(text % found, keys_of(request, self.admin_site, found))
        opts = self.model._meta
        if isinstance(found, KeyQuestion):
            return ask_for_key(request, self.admin_site, opts, found, _("Reset a key"), back)
        data = request.POST if request.method == "POST" else None
        form = KeyResetForm(data, found, offered, request.GET.get("rule", ""))
        if data is None or not form.is_valid():
            return self._form_page(request, form, found, back)
        if not is_confirmed(request):
            return confirmation(request, self.admin_site, opts, _consequences(form, found), back)
        return self._reset(request, form, found, back)

    def _form_page(self, request: HttpRequest, form: KeyResetForm, found: ChosenKey, back: str) -> HttpResponse:
        context = {
            **self.admin_site.each_context(request),
            "title": _("Reset a key"),
            "explained": _("The key gets all permits of the rule again. Its usage stays counted and billed."),
            "chosen": found,
            "inspect_url": found.inspect_url(self.admin_site) if may_inspect(request) else "",
            "form": form,
            "button": _("Show what the reset changes"),
            "media": form.media,
            "opts": self.model._meta,
            "back": back,
        }
        return TemplateResponse(request, "ratelimits/admin/operate_form.html", context)

    def _reset(self, request: HttpRequest, form: KeyResetForm, found: ChosenKey, back: str) -> HttpResponse:
        data = form.cleaned_data
        try:
            row = reset(found.key, data["rule"], data["reason"], account=found.account, by=request.user)
        except UNAVAILABLE as error:
            text = _("Nothing was reset, because Redis or the database does not answer: %s") % error
            self.message_user(request, text, messages.ERROR)
            return HttpResponseRedirect(back)
        self.log_addition(request, row, [{"added": {}}])
        text = _("%(key)s has all permits of %(rule)s again.") % {"key": found, "rule": row.rule}
        self.message_user(request, text, messages.SUCCESS)
        return HttpResponseRedirect(found.inspect_url(self.admin_site) if may_inspect(request) else back)


def _consequences(form: KeyResetForm, found: ChosenKey) -> Consequences:
    rows = []
    for rule, key, standing in form.standings:
        permits, _span = rule.algorithm.quota
        rows.append((rule.name, key, f"{standing.remaining:,}", f"{permits:,}"))
    return Consequences(
        _("Reset %(key)s under %(rule)s") % {"key": found.key, "rule": form.cleaned_data["rule"]},
        [
            _("The key has all permits of the rule again. The usage so far is still counted and billed."),
            _(
                "All leases of the key under this rule end now. A process may repeat a refusal from memory for up to a"
                " second."
            ),
        ],
        heads=[_("rule"), _("counted for"), _("permits left now"), _("permits in total")],
        rows=rows,
    )
