"""The page *Give more*. It makes a grant: overrides that raise a key's capacity under a rule until a given time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied, ValidationError
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ratelimits import moments
from ratelimits.admin.inspected import may_inspect
from ratelimits.admin.operate.chosen_key import ChosenKey, KeyQuestion, ask_for_key, chosen_key, names_of
from ratelimits.admin.operate.confirming import Consequences, confirmation, is_confirmed, may_operate
from ratelimits.admin.operate.offered import OfferedRule, offered_rules
from ratelimits.admin.operate.permits_left import permits_left, used_keys
from ratelimits.admin.operate.running import running_overrides
from ratelimits.admin.typed import MomentField, local_time, moment_inputs
from ratelimits.algorithms.calendar import boundaries
from ratelimits.algorithms.limits import fields_of
from ratelimits.conf import conf
from ratelimits.models import KeyOverride
from ratelimits.models.accounts.named import accounts_now
from ratelimits.models.fields.numbers import WholeNumberFormField
from ratelimits.moments import moment
from ratelimits.rules import RulesUnavailable
from ratelimits.rules.grants import grant, planned
from ratelimits.status.keys import MAX_KEYS


def rule_field() -> forms.ChoiceField:
    """Return a field with a radio button for each rule. A drop-down list would cut off the long choices."""
    return forms.ChoiceField(label=gettext_lazy("Rule"), widget=forms.RadioSelect)


def first_choice(offered: Sequence[OfferedRule], wanted: str) -> str:
    """Return the name of the rule that is chosen when a form opens; "" if no rule is chosen.

    If the rule with the name `wanted` is offered, this rule is chosen. Otherwise, if only one rule is offered, it is
    chosen. If several rules are offered, the rule with the newest refusal is chosen.
    """
    names = [rule.name for rule in offered]
    if wanted in names:
        return wanted
    if len(names) == 1:
        return names[0]
    # `offered` begins with the rule that has the newest refusal.
    return next((rule.name for rule in offered if rule.refused_at), "")


class GrantForm(forms.Form):
    """A form that asks for the rule, the additional capacity, the end of the grant and the reason."""

    required_css_class = "required"
    rule = rule_field()
    extra = WholeNumberFormField(
        widget=forms.TextInput({"inputmode": "numeric"}),
        label=gettext_lazy("How many more"),
        min_value=1,
        help_text=gettext_lazy("This number is added to the capacity of the rule."),
    )
    until = MomentField(label=gettext_lazy("Until"))
    reason = forms.CharField(label=gettext_lazy("Reason"), max_length=200)

    def __init__(self, data: Any, key: ChosenKey, offered: Sequence[OfferedRule], initial: dict[str, Any]) -> None:
        zone, end = _end_of_today(key)
        super().__init__(data, initial={"until": end, **initial})
        self.planned: list[KeyOverride] = []
        self._key = key
        rule = self.fields["rule"]
        assert isinstance(rule, forms.ChoiceField)
        rule.choices = [(one.name, one.grant_label) for one in offered]
        rule.initial = first_choice(offered, initial.get("rule", ""))
        text = _("Filled in: the end of today in the time zone of the account, %(zone)s.") % {"zone": zone}
        self.fields["until"].help_text = f"{self.fields['until'].help_text} {text}"

    def clean(self) -> dict[str, Any]:
        """Calculate the overrides that the grant will add. Show each error at the field with the wrong value."""
        data: dict[str, Any] = super().clean() or {}
        if self.errors:
            return data
        account = self._key.identity.account_id
        try:
            self.planned = planned(self._key.key, data["rule"], data["extra"], data["until"], account=account)
            for override in self.planned:
                override.clean_numbers()
        except ValidationError as error:
            if hasattr(error, "error_dict"):
                self._add_errors(error)
            else:
                self.add_error(None, error)
        return data

    def _add_errors(self, error: ValidationError) -> None:
        """Show each error at its field. If this form does not have the field, show the error above the form."""
        for name, errors in error.error_dict.items():
            self.add_error(name if name in self.fields else None, errors)


def _end_of_today(key: ChosenKey) -> tuple[str, datetime]:
    """Return the time zone of the key's account, and the end of the present day in this time zone."""
    account = key.identity.account_id
    zone = next((row.timezone for row in accounts_now(conf.DATABASE, [account]).values()), "UTC") if account else "UTC"
    _before, _start, end, _after = boundaries("day", zone, None, time.time_ns() // 1000)
    return zone, moment(end)


class GrantView:
    """Shows three pages, one after the other: the choice of the key, the form, and the consequences."""

    def __init__(self, site: admin.AdminSite) -> None:
        self._site = site

    def page(self, request: HttpRequest) -> HttpResponse:
        """Show the form, and then the overrides that the grant will add. Save the overrides if the user confirms."""
        if not may_operate(request):
            raise PermissionDenied
        back = reverse(f"{self._site.name}:ratelimits_access_changelist")
        found = chosen_key(request, self._site)
        offered: list[OfferedRule] = []
        if isinstance(found, ChosenKey):
            try:
                offered = [rule for rule in offered_rules(found.identity, found.key) if rule.has_capacity]
            except RulesUnavailable as error:
                found = KeyQuestion(_("The rules cannot be read: %s") % error)
            else:
                if not offered:
                    found = KeyQuestion(
                        _("No rule with a capacity applies to %s, so there is no limit to raise.") % found
                    )
        if isinstance(found, KeyQuestion):
            return ask_for_key(request, self._site, None, found, _("Give more"), back)
        initial = {name: request.GET[name] for name in ("rule", "extra") if name in request.GET}
        form = GrantForm(request.POST if request.method == "POST" else None, found, offered, initial)
        if request.method != "POST" or not form.is_valid():
            return self._form_page(request, form, found, offered, back)
        (rule,) = (one for one in offered if one.name == form.cleaned_data["rule"])
        if not is_confirmed(request):
            # Put the full date and time into the page that the user confirms. Otherwise a typed "23:00" would mean
            # another day if the user confirms it only after midnight.
            values: Any = request.POST.copy()
            for name, value in moment_inputs("until", form.cleaned_data["until"]).items():
                values[name] = value
            request.POST = values
            return confirmation(request, self._site, None, self._consequences(request, form, found, rule), back)
        return self._grant(request, form, found, rule, back)

    def _form_page(
        self, request: HttpRequest, form: GrantForm, found: ChosenKey, offered: Sequence[OfferedRule], back: str
    ) -> HttpResponse:
        context = {
            **self._site.each_context(request),
            "title": _("Give more"),
            "explained": " ".join(_explanations(offered)),
            "chosen": found,
            "inspect_url": found.inspect_url(self._site) if may_inspect(request) else "",
            "running": running_overrides(request, self._site, [found.key, found.identity.account]),
            "form": form,
            "button": _("Show what this changes"),
            "media": form.media,
            "back": back,
        }
        return TemplateResponse(request, "ratelimits/admin/operate_form.html", context)

    def _grant(
        self, request: HttpRequest, form: GrantForm, found: ChosenKey, rule: OfferedRule, back: str
    ) -> HttpResponse:
        data, account = form.cleaned_data, found.identity.account_id
        rows = grant(
            found.key,
            data["rule"],
            data["extra"],
            data["until"],
            data["reason"],
            account=account,
            by=request.user,
        )
        sentences: list[str] = [_grant_sentence(found, rule, data), *permits_left(found, rule, self._name_of(request))]
        if request.user.has_perm("ratelimits.view_keyoverride"):
            sentences.append(self._undo_sentence(request, rows))
        messages.success(request, format_html_join(" ", "{}", ((sentence,) for sentence in sentences)))
        if may_inspect(request):
            back = found.inspect_url(self._site)
        elif request.user.has_perm("ratelimits.view_keyoverride"):
            back = reverse(f"{self._site.name}:ratelimits_keyoverride_change", args=[rows[0].pk])
        return HttpResponseRedirect(back)

    def _undo_sentence(self, request: HttpRequest, rows: Sequence[KeyOverride]) -> SafeString:
        """Return a sentence with links to the new overrides. A user who may end overrides gets links that end them."""
        may_end = request.user.has_perm("ratelimits.change_keyoverride")
        page = f"{self._site.name}:ratelimits_keyoverride_{'end' if may_end else 'change'}"
        links = format_html_join(", ", '<a href="{}">{}</a>', ((reverse(page, args=[row.pk]), row) for row in rows))
        return format_html("{} {}.", _("To undo this, end the override:"), links)

    def _name_of(self, request: HttpRequest) -> Callable[[str], str]:
        """Return a function that returns the name of an API key, and "" for other keys."""
        return lambda key: ", ".join(names_of(request, self._site, key)) if key.startswith("api_key:") else ""

    def _consequences(self, request: HttpRequest, form: GrantForm, found: ChosenKey, rule: OfferedRule) -> Consequences:
        extra = form.cleaned_data["extra"]
        capacities = [override.capacity for override in form.planned if override.capacity is not None]
        rows = [
            (
                local_time(override.valid_from),
                local_time(override.valid_until),
                f"{override.capacity - extra:,}",
                f"{override.capacity:,}",
            )
            for override in form.planned
            if override.capacity is not None
        ]
        sentences = [
            _grant_sentence(found, rule, form.cleaned_data),
            *permits_left(found, rule, self._name_of(request), extra),
            _(
                "After the end of the grant, the old capacity applies again. Permits that were used by then stay"
                " counted."
            ),
            _("Reason: %s") % form.cleaned_data["reason"],
        ]
        return Consequences(
            _("Give %(more)s") % {"more": rule.extra_text(extra)},
            sentences,
            list(_warnings(form, found, rule, capacities)),
            heads=[_("from"), _("until"), _("capacity before"), _("capacity with the grant")],
            rows=rows,
        )


def _explanations(offered: Sequence[OfferedRule]) -> Iterator[str]:
    """Yield sentences above the form.

    If no rule has a window of a day or longer, a sentence says why no fixed total can be granted, and what else to do.
    """
    yield _("Until the given time, the rule admits more requests. For this, overrides are added that end at this time.")
    if not any(rule.has_long_window for rule in offered):
        yield _(
            "No rule here has a window of a day or longer, so you cannot grant a fixed total: the rule"
            " admits more requests in each of its windows until the end. To give units free of charge once,"
            " add an adjustment: it lowers the bill, but admits no more requests."
        )


def _warnings(form: GrantForm, found: ChosenKey, rule: OfferedRule, capacities: Sequence[int]) -> Iterator[str]:
    """Yield warnings if the key can get more permits than the typed number.

    For an account, also yield a warning if its keys together can get more permits than the typed number.
    """
    extra = form.cleaned_data["extra"]
    values = {"whom": found, "n": f"{extra:,}", "window": rule.window}
    if not rule.window:
        # Other overrides may begin or end during the grant. Then its capacity changes at these moments. The warning
        # names only the first capacity.
        values |= {"before": f"{capacities[0] - extra:,}", "after": f"{capacities[0]:,}"}
        if "rate" in fields_of(rule.algorithm.id):
            text = _(
                "This raises the burst from %(before)s to %(after)s. The rate does not change. So the total can"
                " be more than %(n)s."
            )
        else:
            text = _(
                "This raises the number of requests at the same time from %(before)s to %(after)s. So the total"
                " can be more than %(n)s."
            )
        yield text % values
    elif rule.window_is_shorter_than((form.cleaned_data["until"] - moments.now()).total_seconds()):
        if rule.counts_key_itself:
            text = _("Until then, %(whom)s gets %(n)s more in each %(window)s. So the total can be more than %(n)s.")
        else:
            text = _(
                "Until then, each key of %(whom)s gets %(n)s more in each %(window)s. So the total can be more"
                " than %(n)s."
            )
        yield text % values
    keys = 0 if rule.counts_key_itself else len(used_keys(found))
    if 1 < keys <= MAX_KEYS:  # If there are more keys, their number is not known.
        values |= {"keys": keys, "total": f"{keys * extra:,}"}
        if rule.window:
            text = _(
                "Each of the %(keys)s keys of %(whom)s gets this: up to %(keys)s × %(n)s = %(total)s in all, in each"
                " %(window)s."
            )
        else:
            text = _(
                "Each of the %(keys)s keys of %(whom)s gets this: up to %(keys)s × %(n)s = %(total)s in all, at once."
            )
        yield text % values


def _grant_sentence(found: ChosenKey, rule: OfferedRule, data: dict[str, Any]) -> str:
    """Return the grant as a sentence."""
    values = {
        "whom": found,
        "more": rule.extra_text(data["extra"]),
        "rule": rule.name,
        "until": local_time(data["until"]),
    }
    if rule.counts_key_itself:
        return _("Until %(until)s, %(whom)s has %(more)s (rule %(rule)s).") % values
    return _("Until %(until)s, each key of %(whom)s has %(more)s (rule %(rule)s).") % values
