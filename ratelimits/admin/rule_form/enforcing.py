"""The page that sets the mode of a rule to `enforce`. Before this, it shows whose requests would have been refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import copy
from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.admin import AdminSite
from django.db import router, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.translation import gettext as _

from ratelimits.admin.audited import ReasonForm, recorded_user
from ratelimits.admin.operate.confirming import Consequences, confirmation, is_confirmed
from ratelimits.admin.rule_form.affected import affected
from ratelimits.admin.status.shadow import may_see_shadow, shadow_summary
from ratelimits.models import Rule
from ratelimits.models.versions import editing
from ratelimits.status.refusals import shadow_refusals


class _ConfirmForm(ReasonForm):
    """A form that asks for the reason of the change. `version` is the version of the rule that the page has shown."""

    version = forms.CharField(required=False, widget=forms.HiddenInput)


def enforcing(request: HttpRequest, site: AdminSite, rule: Rule, enforce: Callable[[], None]) -> HttpResponse:
    """Show whose requests the rule would have refused. After the user has confirmed, call `enforce`.

    If the rule was edited after the page was shown, show the page again. The caller must check that the user may change
    the rule.
    """
    name = "shadow_changelist" if may_see_shadow(request) else "rule_changelist"
    back = reverse(f"{site.name}:ratelimits_{name}")
    if rule.mode == Rule.Mode.ENFORCE:
        messages.warning(request, _("The rule %(rule)s is already enforced.") % {"rule": rule})
        return HttpResponseRedirect(back)
    form = _ConfirmForm(request.POST if is_confirmed(request) else None, initial={"version": rule.version})
    if is_confirmed(request) and form.is_valid():
        with recorded_user(request):
            if _enforced(rule, form.cleaned_data["version"], enforce):
                return HttpResponseRedirect(back)
        messages.warning(request, _("The rule was edited after the page was shown. Look at the rule again."))
        return HttpResponseRedirect(request.path)
    return confirmation(request, site, Rule._meta, _consequences(request, rule), back, form=form)


def _enforced(rule: Rule, version: str, enforce: Callable[[], None]) -> bool:
    """Call `enforce` and return True. If the rule no longer has this version, change nothing and return False."""
    using = router.db_for_write(Rule)
    with editing(using):
        # In this block, nobody else can edit the rule.
        current_version = Rule.objects.using(using).filter(pk=rule.pk).values_list("version", flat=True).first()
        if str(current_version) != version:
            transaction.set_rollback(True, using=using)
            return False
        enforce()
    return True


def _consequences(request: HttpRequest, rule: Rule) -> Consequences:
    title = _("Enforce %(rule)s") % {"rule": rule}
    if rule.unreadable():
        return Consequences(title, [], [rule.sentence()])
    (shadow_rule,) = shadow_refusals(time.time(), rule)
    enforced = copy(rule)
    enforced.mode = Rule.Mode.ENFORCE
    affected_keys = affected(enforced, rule.to_algorithm())
    sentences = [
        f"{rule.sentence()}.",
        _("From the next request on, the rule refuses requests above its limit."),
        shadow_summary(shadow_rule),
    ]
    user: Any = request.user
    may_see_keys = may_see_shadow(request) or user.has_perm("ratelimits.view_line")
    rows = [(key.key, key.account or "–", f"{key.requests:,}") for key in shadow_rule.keys] if may_see_keys else []
    heads = [_("key"), _("account"), _("requests that the rule would have refused")]
    warnings: list[str] = []
    if affected_keys.refuses_everyone:
        warnings.append(affected_keys.text)
    else:
        sentences.append(affected_keys.text)
    return Consequences(title, sentences, warnings, heads, rows)
