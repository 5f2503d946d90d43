"""Blocks and allows in the admin.

A block refuses all requests of a key or network. An allow exempts all requests of a key or network from all rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path, reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ratelimits import moments, unknown_names
from ratelimits.admin.audited import REASON, AuditedAdmin, InForceFilter
from ratelimits.admin.operate.access_form import LASTS, AccessForm
from ratelimits.admin.operate.chosen_key import names_of, searched_tables
from ratelimits.admin.operate.confirming import Consequences, confirmation, is_confirmed, may_operate
from ratelimits.admin.operate.ending import EndsRows
from ratelimits.admin.operate.grants import GrantView
from ratelimits.admin.suggestions import KeySuggestions
from ratelimits.admin.typed import MOMENTS, moment_inputs
from ratelimits.conf import conf
from ratelimits.engine.keys import ledger_name
from ratelimits.identity import identify
from ratelimits.models import Access
from ratelimits.models.access.targets import address_count
from ratelimits.models.history import MAX_REASON
from ratelimits.models.keys import key_name
from ratelimits.rules.access import AccessIndex, of_model
from ratelimits.status.additions import requests_of
from ratelimits.status.keys import known_keys, no_effect_text

_DAY = 86_400


@admin.register(Access)
class AccessAdmin(EndsRows, KeySuggestions, AuditedAdmin):
    """The blocks and allows. Users can end a block or allow that is in force, but cannot delete it.

    So the list also shows former blocks and allows. If a row has not begun yet, to end it means to delete it.
    """

    change_list_template = "ratelimits/admin/access_change_list.html"
    form = AccessForm
    formfield_overrides = MOMENTS
    key_fields = ("target",)
    list_filter = ["effect", InForceFilter]
    search_fields = ["target", "reason", "message"]
    actions = ["end_now"]
    readonly_fields = ["requests"]
    fieldsets = [
        (None, {"fields": ["effect", "target", "reason"]}),
        (gettext_lazy("When"), {"fields": ["valid_from", LASTS, "valid_until"]}),
        (gettext_lazy("What a blocked client receives"), {"fields": ["status", "message"]}),
        (gettext_lazy("So far"), {"fields": ["requests"]}),
    ]

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return may_operate(request) or super().has_view_permission(request, obj)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return may_operate(request)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return may_operate(request)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_urls(self) -> list[URLPattern]:
        grants = GrantView(self.admin_site)
        grant = path("grant/", self.admin_site.admin_view(grants.page), name="ratelimits_access_grant")
        return [grant, *super().get_urls()]

    def get_list_display(self, request: HttpRequest) -> list[Any]:
        """Return the columns. The column of requests reads the totals only once for all rows of the list."""
        count = requests_of()
        counts: Mapping[str, int] | None = None

        @admin.display(description=gettext_lazy("requests in 24 hours"))
        def requests(row: Access) -> str:
            nonlocal counts
            assert count is not None
            if counts is None:
                counts = count(None, _DAY)
            return f"{counts.get(ledger_name(key_name(row.target)), 0):,}"

        counted = [] if count is None else [requests]
        return self.columns(["target", "effect", "state", "valid_from", "valid_until", *counted, "reason"])

    @admin.display(description=gettext_lazy("state"))
    def state(self, row: Access) -> str:
        """Return a word that says whether the row is in force."""
        now = moments.now()
        if row.in_force(now):
            return _("in force")
        return _("later") if row.valid_from is not None and row.valid_from > now else _("ended")

    @admin.display(description=gettext_lazy("requests in 30 days"))
    def requests(self, row: Access | None) -> str:
        """Return the number of requests that were refused or exempted for the row's target in 30 days."""
        count = requests_of()
        if count is None or row is None or row.pk is None:
            return "–"
        return f"{sum(count([row.target], 30 * _DAY).values()):,}"

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        context = {**(extra_context or {}), "may_operate": may_operate(request)}
        return super().changelist_view(request, context)

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Show the consequences of a valid form. Save the form only after the user has confirmed the consequences."""
        if request.method == "POST" and may_operate(request) and not is_confirmed(request):
            row = self.get_object(request, object_id) if object_id is not None else None
            if object_id is None or row is not None:
                form: Any = self.get_form(request, row, change=row is not None)(request.POST, instance=row)
                if form.is_valid():
                    target, opts = form.instance.target, self.model._meta
                    # The user confirms exactly this key and these moments. At the time of the confirmation, the typed
                    # texts could mean another key or other moments.
                    values: Any = request.POST.copy()
                    values["target"], values[LASTS] = target, ""
                    for name in ("valid_from", "valid_until"):
                        for one_input, value in moment_inputs(name, getattr(form.instance, name)).items():
                            values[one_input] = value
                    request.POST = values
                    back = reverse(f"{self.admin_site.name}:ratelimits_access_changelist")
                    names = tuple(names_of(request, self.admin_site, target))
                    page = consequences(request, form.instance, names)
                    return confirmation(request, self.admin_site, opts, page, back)
        return super().changeform_view(request, object_id, form_url, extra_context)

    def get_form(self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        """Return the form. Its search finds only keys that this user may view."""
        form = super().get_form(request, obj, change, **kwargs)
        tables = searched_tables(request, self.admin_site)
        form.search = staticmethod(lambda text: known_keys(text, tables).keys)
        return form

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return the fieldsets. The form of a new row asks for one reason, and stores it for the row and for the edit.

        Leave out the choice of a length of time if the user may not save the form. Such a user sees only the columns of
        the row, and this choice is not a column.
        """
        hidden = set() if may_operate(request) else {LASTS}
        if requests_of() is None:
            hidden.add("requests")
        fieldsets = []
        for title, options in super().get_fieldsets(request, obj):
            if obj is not None or options["fields"] != [REASON]:
                fields = [name for name in options["fields"] if name not in hidden]
                if fields:
                    fieldsets.append((title, {**options, "fields": fields}))
        return fieldsets

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        obj._change_reason = (request.POST.get(REASON) or obj.reason)[:MAX_REASON]
        super().save_model(request, obj, form, change)

    def effect_of(self, request: HttpRequest, row: Access) -> tuple[list[str], list[str]]:
        """Return sentences and warnings about the effect of the block or allow."""
        page = consequences(request, row, tuple(names_of(request, self.admin_site, row.target)))
        return list(page.sentences), list(page.warnings)

    def _warn(self, request: HttpRequest, row: Any) -> None:
        """Do nothing: the page with the consequences has already shown the warnings."""

    @admin.action(description=gettext_lazy("End the selected blocks and allows now"), permissions=["change"])
    def end_now(self, request: HttpRequest, queryset: QuerySet[Access]) -> HttpResponse | None:
        """Ask for a reason. Then end the rows that are in force, and delete the rows that begin later."""
        return self.end_rows(request, queryset.order_by("pk"))

    def end_consequences(self, rows: Sequence[Access]) -> Consequences:
        """Return what happens if these blocks and allows end now."""
        return Consequences(
            _("End now"),
            [_("The rules decide these requests again. This takes about a second to reach every process.")],
            heads=[_("key or network"), _("effect"), _("reason")],
            rows=[(row.target, row.get_effect_display(), row.reason) for row in rows],
        )


def consequences(request: HttpRequest, row: Access, names: Sequence[str] = ()) -> Consequences:
    """Return the consequences of an unsaved row.

    A warning says if the row blocks the user of this page. Another warning says if no user, account or API key has the
    row's key. `names` are the names of the row's target, such as a user name.
    """
    blocks = row.effect == Access.Effect.BLOCK
    target = f"{row.target} ({', '.join(names)})" if names else row.target
    count, values = address_count(row.target), {"target": target, "status": row.status}
    if blocks:
        sentences = [_("Every request of %(target)s is refused with %(status)s, whatever the rules say.") % values]
    else:
        sentences = [_("No rule limits %(target)s. Its requests are not counted as usage and not billed.") % values]
    if count is not None and count > 1:
        is_ipv6 = ":" in row.target.removeprefix("ip:")
        text = (
            _("The network contains %(n)s networks of the size /64. Usually each of them is one internet connection.")
            if is_ipv6
            else _("The network has %(n)s addresses.")
        )
        sentences.append(text % {"n": f"{count:,}"})
    elif row.target.startswith("account:"):
        sentences.append(_("This concerns all keys of the account."))
    begins = moments.local(row.valid_from) if row.valid_from else None
    ends = moments.local(row.valid_until) if row.valid_until else None
    sentences.append(
        (_("From %s") % f"{begins:%Y-%m-%d %H:%M %Z}" if begins else _("From the next request"))
        + " "
        + (_("until %s.") % f"{ends:%Y-%m-%d %H:%M %Z}" if ends else _("without an end."))
    )
    warnings = [no_effect_text(row.target), *unknown_names.in_row(row)]
    # Also warn if the block begins later. For this, a copy of the block gets the start 0, and is looked up at the
    # moment 0.
    if blocks and AccessIndex([of_model(row)._replace(valid_from=0)]).find(identify(request), 0) is not None:
        warnings.append(
            _(
                "This also blocks your own requests. You then cannot use these admin pages either. The command"
                " ratelimits_key unblock ends the block."
            )
            if request.path_info.startswith(tuple(conf.PATHS))
            else _("This also blocks your own requests to the API. You can still use these admin pages.")
        )
    sentences.append(_("Reason: %s") % row.reason)
    if blocks and row.message:
        sentences.append(_("Blocked clients read: %s") % row.message)
    title = _("Block %(target)s") % values if blocks else _("Allow %(target)s") % values
    return Consequences(title, sentences, list(filter(None, warnings)))
