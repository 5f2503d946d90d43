"""Resets in the admin. Whoever adds a reset gives a key all permits of a rule again."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ratelimits.admin.operate.confirming import Consequences, confirmation, is_confirmed, may_operate
from ratelimits.admin.operate.grants import rule_choices
from ratelimits.admin.readonly import ReadOnlyAdmin
from ratelimits.admin.suggestions import KeySuggestions
from ratelimits.models import KeyReset
from ratelimits.quota.operating import NothingDoneError, counted_under, reset
from ratelimits.quota.standings import UNAVAILABLE


class KeyResetForm(forms.ModelForm):  # type: ignore[type-arg]
    """A form for a reset. The user chooses one of the names of existing rules."""

    rule = forms.ChoiceField(label=gettext_lazy("Rule"))

    class Meta:
        model = KeyReset
        fields = ["key", "account", "rule", "reason"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.standings: list[Any] = []
        rule = self.fields.get("rule")
        if isinstance(rule, forms.ChoiceField):
            rule.choices = rule_choices()

    def clean(self) -> dict[str, Any]:
        """Read how many permits the key has left. Show an error above the form."""
        data: dict[str, Any] = super().clean() or {}
        if not self.errors:
            try:
                self.standings = counted_under(data["key"], data["rule"], data["account"])
            except (NothingDoneError, ValidationError) as error:
                self.add_error(None, str(error) if isinstance(error, NothingDoneError) else error)
            except UNAVAILABLE as error:
                self.add_error(None, _("Redis or the database does not answer: %s") % error)
        return data


@admin.register(KeyReset)
class KeyResetAdmin(KeySuggestions, ReadOnlyAdmin):
    """The resets that users have made, and the form for a new reset."""

    account_fields = ("account",)
    list_display = ["key", "rule", "account", "reason", "made_by", "at"]
    search_fields = ["key", "reason"]
    fields = ["key", "account", "rule", "reason", "made_by", "at"]
    readonly_fields = ["made_by", "at"]
    form = KeyResetForm

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return may_operate(request) or super().has_view_permission(request, obj)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return may_operate(request)

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        return ["key", "account", "rule", "reason"] if obj is None else self.fields

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        return self.readonly_fields if obj is not None else ()

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
        """Show the consequences of a reset. Reset the key after the user has confirmed them."""
        back = reverse(f"{self.admin_site.name}:ratelimits_keyreset_changelist")
        if request.method == "POST" and may_operate(request):
            form: Any = self.get_form(request)(request.POST)
            if form.is_valid():
                if not is_confirmed(request):
                    return confirmation(request, self.admin_site, self.model._meta, _consequences(form), back)
                data = form.cleaned_data
                try:
                    row = reset(data["key"], data["rule"], data["reason"], account=data["account"], by=request.user)
                except UNAVAILABLE as error:
                    text = _("Nothing was reset: Redis or the database does not answer: %s") % error
                    self.message_user(request, text, messages.ERROR)
                    return HttpResponseRedirect(back)
                self.log_addition(request, row, [{"added": {}}])
                text = _("%(key)s has all permits of %(rule)s again.") % {"key": row.key, "rule": row.rule}
                self.message_user(request, text, messages.SUCCESS)
                return HttpResponseRedirect(back)
        return super().add_view(request, form_url, extra_context)


def _consequences(form: KeyResetForm) -> Consequences:
    return Consequences(
        _("Reset %(key)s under %(rule)s") % form.cleaned_data,
        [
            _("The key has all permits of the rule again. The usage so far is still counted and billed."),
            _(
                "All leases of the key under this rule end now. A process may repeat a refusal from memory for up to a"
                " second."
            ),
        ],
        heads=[_("rule"), _("counted for"), _("permits left now"), _("of all permits")],
        rows=[
            (rule.name, key, f"{standing.remaining:,}", f"{rule.algorithm.quota[0]:,}")
            for rule, key, standing in form.standings
        ],
    )
