"""The page that gives a key a higher capacity under a rule until a time."""

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

from ratelimits.admin.operate.confirming import Consequences, confirmation, is_confirmed, may_operate
from ratelimits.models import KeyOverride, Rule
from ratelimits.models.keys import validate_key
from ratelimits.quota.operating import NotOperatedError, identity_of
from ratelimits.rules.grants import grant, planned


def rule_choices() -> list[tuple[str, str]]:
    """Return the names of all rules, for a form."""
    names = sorted({*Rule.objects.order_by().values_list("name", flat=True)})
    return [("", "---------"), *((name, name) for name in names)]


class GrantForm(forms.Form):
    """Asks for the key, the rule, how much more and until when."""

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
            "The account of a user or API key; write - if there is none. Empty: the account in the key's latest usage."
        ),
    )
    rule = forms.ChoiceField(label=gettext_lazy("Rule"))
    extra = forms.IntegerField(
        label=gettext_lazy("How many more"), min_value=1, help_text=gettext_lazy("Added to the capacity.")
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
        """Plan the overrides. An error is shown at its field."""
        data: dict[str, Any] = super().clean() or {}
        if self.errors:
            return data
        try:
            data["account"] = data["account"] or identity_of(data["key"]).owner
            self.planned = planned(data["key"], data["rule"], data["extra"], data["until"], account=data["account"])
            for override in self.planned:
                override.clean_numbers()
        except NotOperatedError as error:
            self.add_error("account", str(error))
        except ValidationError as error:
            self.add_error(None, error) if not hasattr(error, "error_dict") else self._add_all(error)
        return data

    def _add_all(self, error: ValidationError) -> None:
        for name, errors in error.error_dict.items():
            self.add_error(name if name in self.fields else None, errors)


class GrantView:
    """The page in its steps: the form, the confirmation, and then the page of the new override."""

    def __init__(self, site: admin.AdminSite, opts: Any) -> None:
        self._site, self._opts = site, opts

    def page(self, request: HttpRequest) -> HttpResponse:
        """Show the form, then the overrides that it will add; save them after the user has confirmed them."""
        if not may_operate(request):
            raise PermissionDenied
        back = reverse(f"{self._site.name}:ratelimits_access_changelist")
        initial = {name: request.GET[name] for name in ("key", "account", "rule", "extra") if name in request.GET}
        form = GrantForm(request.POST if request.method == "POST" else None, initial=initial)
        if request.method != "POST" or not form.is_valid():
            context = {
                **self._site.each_context(request),
                "title": _("Grant more"),
                "explained": _(
                    "The key gets a higher capacity under the rule until a time. This adds overrides with an end. The"
                    " higher capacity is in force in every window of the rule until then."
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
        text = _("%(key)s has %(extra)s more under %(rule)s until %(until)s.") % {
            **data,
            "until": _shown(data["until"]),
        }
        messages.success(request, text)
        if request.user.has_perm("ratelimits.view_keyoverride"):
            back = reverse(f"{self._site.name}:ratelimits_keyoverride_change", args=[rows[0].pk])
        return HttpResponseRedirect(back)


def _consequences(form: GrantForm) -> Consequences:
    extra = form.cleaned_data["extra"]
    rows = [
        (_shown(one.valid_from), _shown(one.valid_until), f"{one.capacity - extra:,}", f"{one.capacity:,}")
        for one in form.planned
        if one.capacity is not None
    ]
    said = _("Under the rule %(rule)s the capacity of %(key)s becomes:") % form.cleaned_data
    return Consequences(
        _("Grant more"), [said], heads=[_("from"), _("until"), _("capacity before"), _("capacity then")], rows=rows
    )


def _shown(moment: datetime | None) -> str:
    return f"{timezone.localtime(moment):%Y-%m-%d %H:%M %Z}"
