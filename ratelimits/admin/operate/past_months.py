"""Ask before an edit of a plan or an account changes the bill of a past month, which still runs somewhere."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from time import time_ns
from typing import TYPE_CHECKING, Any

from django.contrib.admin.utils import unquote
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _

from ratelimits import moments
from ratelimits.admin.operate.confirming import Consequences, confirmation, is_confirmed
from ratelimits.admin.typed import primary_key
from ratelimits.admin.usage import month_text
from ratelimits.algorithms.billing_periods import month_of
from ratelimits.conf import conf
from ratelimits.reports.statements.still_running import StillRunning, still_running, with_amounts

if TYPE_CHECKING:
    from ratelimits.admin.audited import AuditedAdmin as _Base
else:
    _Base = object

#: Maximum number of periods that the page lists with their amounts.
_MAX_LISTED = 20


class AsksAboutRunning(_Base):
    """Mixin for the admin pages of plans and accounts. Put it before `AuditedAdmin`.

    Before the first save that changes the bill of a month which people think of as past, a page lists the periods that
    still run in this month, with the amounts before and after the edit. The edit itself is rolled back meanwhile.
    """

    def billed_accounts(self, pk: Any) -> Collection[str]:
        """Return the accounts whose bills depend on the row with this primary key."""
        raise NotImplementedError

    def doubts(self, request: HttpRequest, row: Any, *, is_new: bool) -> list[str]:
        """Return further sentences about a saved row that people must have read before it is committed."""
        return []

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        if request.method == "POST" and not is_confirmed(request):
            pk = None if object_id is None else primary_key(self.model, unquote(object_id))
            accounts = () if pk is None else self.billed_accounts(pk)
            request.running_before = self._running(accounts)  # type: ignore[attr-defined]
        return super().changeform_view(request, object_id, form_url, extra_context)

    def response_add(self, request: HttpRequest, obj: Any, post_url_continue: str | None = None) -> HttpResponse:
        return self._question(request, obj, is_new=True) or super().response_add(request, obj, post_url_continue)

    def response_change(self, request: HttpRequest, obj: Any) -> HttpResponse:
        return self._question(request, obj, is_new=False) or super().response_change(request, obj)

    def _running(self, accounts: Collection[str]) -> list[StillRunning]:
        """Return the first periods that still run, with amounts; one more than are listed if there are more."""
        now = time_ns() // 1000
        # A month is past for people if it is past in UTC or in their own time zone.
        month = max(month_of(now, "UTC"), f"{moments.local(moments.now()):%Y-%m}")
        running = list(islice(still_running(conf.DATABASE, accounts, now, month), _MAX_LISTED + 1))
        return with_amounts(conf.DATABASE, running)

    def _question(self, request: HttpRequest, row: Any, *, is_new: bool) -> HttpResponse | None:
        """Return the page that asks, if the saved edit changes such a bill; None if it must be committed.

        The status of the page is 200, so `AuditedAdmin` rolls the edit back.
        """
        if is_confirmed(request):
            return None
        before = {(each.account, each.period): each for each in getattr(request, "running_before", ())}
        after = {(each.account, each.period): each for each in self._running(self.billed_accounts(row.pk))}
        rows = []
        for account, period in sorted(before.keys() | after.keys()):
            owed = [each.owed if (each := state.get((account, period))) else "" for state in (before, after)]
            if owed[0] != owed[1] or (account, period) not in before or (account, period) not in after:
                end = f"{period.local_end()} {period.timezone}"
                rows.append((account, month_text(period.label), end, owed[0] or "–", owed[1] or "–"))
        warnings = self.doubts(request, row, is_new=is_new)
        sentences = []
        if rows:
            warnings.append(
                _("This edit changes bills of a past month, which still runs in the time zones of these accounts.")
            )
        if len(after) > _MAX_LISTED:
            # The bills of further accounts are not compared, so nobody knows whether the edit changes them.
            warnings.append(
                _("More than %(count)s accounts are still in a past month. The bills of the others were not compared.")
                % {"count": _MAX_LISTED}
            )
        if rows or len(after) > _MAX_LISTED:
            sentences.append(
                _(
                    "To change only the next billing period, save after these moments, or choose the next plan of an"
                    " account on its page."
                )
            )
        if not warnings:
            return None
        consequences = Consequences(
            title=str(_("Save: %(row)s") % {"row": row}),
            sentences=sentences,
            warnings=warnings,
            heads=[_("account"), _("period"), _("ends"), _("overage so far, before"), _("overage so far, after")],
            rows=rows,
        )
        return confirmation(request, self.admin_site, self.model._meta, consequences, request.get_full_path())
