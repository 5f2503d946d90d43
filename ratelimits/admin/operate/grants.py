"""The page that grants a key more: until a given time, the key has a higher capacity under a rule."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.widgets import AdminSplitDateTime
from django.core.exceptions import PermissionDenied, ValidationError
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ratelimits.admin.inspected import may_inspect
from ratelimits.admin.operate.confirming import Consequences, confirmation, is_confirmed, may_operate
from ratelimits.admin.suggestions import suggest_keys
from ratelimits.models import KeyOverride, Rule
from ratelimits.models.keys import validate_key
from ratelimits.quota.operating import NothingDoneError, identity_of
from ratelimits.rules.grants import grant, planned


def rule_choices() -> list[tuple[str, str]]:
    """Return the names of all rules, for a form."""
    names = sorted({*Rule.objects.order_by().values_list("name", flat=True)})
    return [("", "---------"), *((name, name) for name in names)]


class GrantForm(forms.Form):
    """A form that asks for the key, the rule, the additional capacity and its end."""

    key = forms.CharField(
        label=gettext_lazy("Key"),
        max_length=160,
        validators=[validate_key],
        help_text=gettext_lazy("Such as account:acme, user:42, api_key:9f3c or ip:203.0.113.9."),
    )
    account = forms.CharField(
        label=gettext_lazy("Account"),
        max_length=255,
        required=False,
        help_text=gettext_lazy(
            "The account of a user or API key; write - if there is none. Empty: the account of the key's latest usage."
        ),
    )
    rule = forms.ChoiceField(label=gettext_lazy("Rule"))
    extra = forms.IntegerField(
        label=gettext_lazy("How many more"),
        min_value=1,
        help_text=gettext_lazy("This number is added to the capacity."),
    )
    until = forms.SplitDateTimeField(label=gettext_lazy("Until"), widget=AdminSplitDateTime)
    reason = forms.CharField(label=gettext_lazy("Reason"), max_length=200)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.planned: list[KeyOverride] = []
        rule = self.fields["rule"]
        assert isinstance(rule, forms.ChoiceField)
        rule.choices = rule_choices()

    def clean(self) -> dict[str, Any]:
        """Calculate the overrides that the grant will add. Show each error at the field with the wrong value."""
        data: dict[str, Any] = super().clean() or {}
        if self.errors:
            return data
        try:
            data["account"] = data["account"] or identity_of(data["key"]).account_id
            self.planned = planned(data["key"], data["rule"], data["extra"], data["until"], account=data["account"])
            for override in self.planned:
                override.clean_numbers()
        except NothingDoneError as error:
            self.add_error("account", str(error))
        except ValidationError as error:
            self.add_error(None, error) if not hasattr(error, "error_dict") else self._add_errors(error)
        return data

    def _add_errors(self, error: ValidationError) -> None:
        for name, errors in error.error_dict.items():
            self.add_error(name if name in self.fields else None, errors)


class GrantView:
    """Shows three pages, one after the other: the form, the consequences to confirm, and the new override."""

    def __init__(self, site: admin.AdminSite, opts: Any) -> None:
        self._site, self._opts = site, opts

    def page(self, request: HttpRequest) -> HttpResponse:
        """Show the form, then the overrides that the grant will add. Save them after the user has confirmed them."""
        if not may_operate(request):
            raise PermissionDenied
        back = reverse(f"{self._site.name}:ratelimits_access_changelist")
        initial = {name: request.GET[name] for name in ("key", "account", "rule", "extra") if name in request.GET}
        form = GrantForm(request.POST if request.method == "POST" else None, initial=initial)
        if may_inspect(request):
            suggest_keys(form.fields["key"], self._site.name, "keys")
            suggest_keys(form.fields["account"], self._site.name, "accounts")
        if request.method != "POST" or not form.is_valid():
            context = {
                **self._site.each_context(request),
                "title": _("Grant more"),
                "explained": _(
                    "The key gets a higher capacity under the rule until the given time, in every window of the rule."
                    " The grant adds overrides that end at this time."
                ),
                "form": form,
                "media": form.media,
                "opts": self._opts,
                "back": back,
            }
            return TemplateResponse(request, "ratelimits/admin/operate_form.html", context)
        data = form.cleaned_data
        if not is_confirmed(request):
            return confirmation(request, self._site, self._opts, _consequences(form), back)
        rows = grant(
            *(data[name] for name in ("key", "rule", "extra", "until", "reason")),
            account=data["account"],
            by=request.user,
        )
        text = _("Until %(until)s, %(key)s has %(extra)s more in each window of the rule %(rule)s.") % {
            **data,
            "extra": f"{data['extra']:,}",
            "until": _local_time(data["until"]),
        }
        messages.success(request, text)
        if request.user.has_perm("ratelimits.view_keyoverride"):
            back = reverse(f"{self._site.name}:ratelimits_keyoverride_change", args=[rows[0].pk])
        return HttpResponseRedirect(back)


def _consequences(form: GrantForm) -> Consequences:
    extra = form.cleaned_data["extra"]
    rows = [
        (
            _local_time(override.valid_from),
            _local_time(override.valid_until),
            f"{override.capacity - extra:,}",
            f"{override.capacity:,}",
        )
        for override in form.planned
        if override.capacity is not None
    ]
    sentence = _("The capacity of %(key)s in each window of the rule %(rule)s becomes:") % form.cleaned_data
    return Consequences(
        _("Grant more"),
        [sentence],
        heads=[_("from"), _("until"), _("capacity before"), _("capacity with the grant")],
        rows=rows,
    )


def _local_time(moment: datetime | None) -> str:
    return f"{timezone.localtime(moment):%Y-%m-%d %H:%M %Z}"
