"""The page that grants a key more: until a given time, the key has a higher capacity under a rule."""

from __future__ import annotations

import time
from collections.abc import Sequence
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
from ratelimits.admin.operate.offered import OfferedRule, offered_rules
from ratelimits.admin.operate.permits_left import permits_left
from ratelimits.admin.operate.whom import Question, Whom, ask_whom, whom
from ratelimits.algorithms.calendar import boundaries
from ratelimits.conf import conf
from ratelimits.models import Account, KeyOverride
from ratelimits.models.ledger import moment
from ratelimits.rules import RulesUnavailable
from ratelimits.rules.grants import grant, planned


def rule_choices(offered: Sequence[OfferedRule]) -> list[tuple[str, str]]:
    """Return the rules as choices of a form. If there is only one, no other choice is possible."""
    choices = [(rule.name, rule.label) for rule in offered]
    return choices if len(choices) == 1 else [("", "---------"), *choices]


def first_choice(offered: Sequence[OfferedRule], wanted: str) -> str:
    """Return the rule that a form chooses first: the wanted rule, or else the rule that refused the key lately."""
    names = [rule.name for rule in offered]
    return wanted if wanted in names else next((rule.name for rule in offered if rule.refused_at), "")


class GrantForm(forms.Form):
    """A form that asks for the rule, the additional capacity and its end."""

    rule = forms.ChoiceField(label=gettext_lazy("Rule"))
    extra = forms.IntegerField(
        label=gettext_lazy("How many more"),
        min_value=1,
        help_text=gettext_lazy("This number is added to the capacity of the rule."),
    )
    until = forms.SplitDateTimeField(label=gettext_lazy("Until"), widget=AdminSplitDateTime)
    reason = forms.CharField(label=gettext_lazy("Reason"), max_length=200)

    def __init__(self, data: Any, whom: Whom, offered: Sequence[OfferedRule], initial: dict[str, Any]) -> None:
        zone, end = _end_of_today(whom)
        super().__init__(data, initial={"until": end, **initial})
        self.planned: list[KeyOverride] = []
        self._whom = whom
        rule = self.fields["rule"]
        assert isinstance(rule, forms.ChoiceField)
        rule.choices = rule_choices(offered)
        rule.initial = first_choice(offered, initial.get("rule", ""))
        text = _("In the time zone %(here)s. Filled in: the end of today in the time zone of the account, %(zone)s.")
        self.fields["until"].help_text = text % {"here": timezone.get_current_timezone_name(), "zone": zone}

    def clean(self) -> dict[str, Any]:
        """Calculate the overrides that the grant will add. Show each error at the field with the wrong value."""
        data: dict[str, Any] = super().clean() or {}
        if self.errors:
            return data
        account = self._whom.identity.account_id
        try:
            self.planned = planned(self._whom.key, data["rule"], data["extra"], data["until"], account=account)
            for override in self.planned:
                override.clean_numbers()
        except ValidationError as error:
            self.add_error(None, error) if not hasattr(error, "error_dict") else self._add_errors(error)
        return data

    def _add_errors(self, error: ValidationError) -> None:
        for name, errors in error.error_dict.items():
            self.add_error(name if name in self.fields else None, errors)


def _end_of_today(whom: Whom) -> tuple[str, datetime]:
    """Return the time zone of the key's account, and the end of the present day there."""
    accounts = Account.objects.using(conf.DATABASE).filter(identifier=whom.identity.account_id)
    zone = accounts.values_list("timezone", flat=True).first() or "UTC"
    _before, _start, end, _after = boundaries("day", zone, None, time.time_ns() // 1000)
    return zone, moment(end)


class GrantView:
    """Shows three pages, one after the other: for whom, the form, and the consequences to confirm."""

    def __init__(self, site: admin.AdminSite, opts: Any) -> None:
        self._site, self._opts = site, opts

    def page(self, request: HttpRequest) -> HttpResponse:
        """Show the form, then the overrides that the grant will add. Save them after the user has confirmed them."""
        if not may_operate(request):
            raise PermissionDenied
        back = reverse(f"{self._site.name}:ratelimits_access_changelist")
        found = whom(request, self._site)
        offered: list[OfferedRule] = []
        if isinstance(found, Whom):
            try:
                offered = [rule for rule in offered_rules(found.identity, found.key) if rule.has_capacity]
            except RulesUnavailable as error:
                found = Question(_("The rules cannot be read: %s") % error)
            else:
                if not offered:
                    found = Question(_("No rule with a capacity applies to %s, so there is no limit to raise.") % found)
        if isinstance(found, Question):
            return ask_whom(request, self._site, self._opts, found, _("Grant more"), back)
        initial = {name: request.GET[name] for name in ("rule", "extra") if name in request.GET}
        form = GrantForm(request.POST if request.method == "POST" else None, found, offered, initial)
        if request.method != "POST" or not form.is_valid():
            return self._form_page(request, form, found, back)
        (rule,) = (one for one in offered if one.name == form.cleaned_data["rule"])
        if not is_confirmed(request):
            return confirmation(request, self._site, self._opts, _consequences(form, found, rule), back)
        return self._grant(request, form, found, rule, back)

    def _form_page(self, request: HttpRequest, form: GrantForm, found: Whom, back: str) -> HttpResponse:
        context = {
            **self._site.each_context(request),
            "title": _("Grant more"),
            "explained": _(
                "Until the given time, the rule admits more requests. The grant adds overrides that end at this time."
            ),
            "whom": found,
            "inspect_url": found.inspect_url(self._site) if may_inspect(request) else "",
            "form": form,
            "button": _("Show what the grant changes"),
            "media": form.media,
            "opts": self._opts,
            "back": back,
        }
        return TemplateResponse(request, "ratelimits/admin/operate_form.html", context)

    def _grant(self, request: HttpRequest, form: GrantForm, found: Whom, rule: OfferedRule, back: str) -> HttpResponse:
        data, account = form.cleaned_data, found.identity.account_id
        rows = grant(
            found.key,
            *(data[name] for name in ("rule", "extra", "until", "reason")),
            account=account,
            by=request.user,
        )
        sentences = [_granted(found, rule, data), *permits_left(found, rule)]
        messages.success(request, " ".join(sentences))
        if may_inspect(request):
            back = found.inspect_url(self._site)
        elif request.user.has_perm("ratelimits.view_keyoverride"):
            back = reverse(f"{self._site.name}:ratelimits_keyoverride_change", args=[rows[0].pk])
        return HttpResponseRedirect(back)


def _granted(found: Whom, rule: OfferedRule, data: dict[str, Any]) -> str:
    """Return the grant as a sentence."""
    values = {"whom": found, "more": rule.more(data["extra"]), "rule": rule.name, "until": _local_time(data["until"])}
    if rule.counts_it:
        return _("Until %(until)s, %(whom)s has %(more)s (rule %(rule)s).") % values
    return _("Until %(until)s, each key of %(whom)s has %(more)s (rule %(rule)s).") % values


def _consequences(form: GrantForm, found: Whom, rule: OfferedRule) -> Consequences:
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
    sentences = [
        _granted(found, rule, form.cleaned_data),
        *permits_left(found, rule, extra),
        _("After that, the old capacity applies again. What was used until then stays counted."),
    ]
    warnings = []
    if rule.repeats_before((form.cleaned_data["until"] - timezone.now()).total_seconds()):
        warnings.append(
            _("The key gets %(n)s more again and again, in each %(window)s until then; not %(n)s in all.")
            % {"n": f"{extra:,}", "window": rule.window}
        )
    return Consequences(
        _("Grant %(more)s") % {"more": rule.more(extra)},
        sentences,
        warnings,
        heads=[_("from"), _("until"), _("capacity before"), _("capacity with the grant")],
        rows=rows,
    )


def _local_time(moment: datetime | None) -> str:
    return f"{timezone.localtime(moment):%Y-%m-%d %H:%M %Z}"
