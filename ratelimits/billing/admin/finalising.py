"""The page that finalises chosen periods. It first shows the reports, and then writes exactly these reports."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any, NamedTuple

from django.contrib import messages
from django.contrib.admin import AdminSite
from django.contrib.admin.models import ADDITION, LogEntry
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ratelimits.admin.operate.confirming import CONFIRMED, is_confirmed
from ratelimits.billing.admin.charges import TotalRow, owed, total_rows
from ratelimits.billing.reports.closing.open_periods import open_periods
from ratelimits.billing.reports.gaps import in_words
from ratelimits.billing.reports.statements.finalising import Outcome, Preview, TokenAndStart, finalise_chosen
from ratelimits.conf import conf
from ratelimits.models.accounts.named import NamedCustomer, of_tokens
from ratelimits.usage.admin.ledger import moment_text, period_text

#: The permission to finalise periods.
FINALISE = "ratelimits_billing.finalise"
#: Maximum number of periods that are finalised at once.
MAX_CHOSEN = 200
#: Maximum number of reports that a message names.
_MAX_NAMED = 10
#: Maximum number of digits of a period's start (µs since 1970 UTC).
_MAX_DIGITS = 17


def may_finalise(request: HttpRequest) -> bool:
    """Return whether the user may finalise periods."""
    return request.user.has_perm(FINALISE)


def chosen_value(token: str, start: int) -> str:
    """Return the value that stands for a customer's period in a form."""
    return f"{start}:{token}"


class PreviewedReport(NamedTuple):
    """A report on the page, as texts.

    Two texts are values of hidden inputs: `period_value` stands for the period, and `shown_value` has the digest of the
    report and the `period_value`.
    """

    account: str
    period: str
    plan: str
    lines: int
    gaps: str
    rows: list[TotalRow]
    owed: str
    period_value: str
    shown_value: str


class FinaliseView:
    """The page that finalises chosen periods. `back` is the URL of the list of open periods."""

    def __init__(self, site: AdminSite, opts: Any, back: str) -> None:
        self._site, self._opts, self._back = site, opts, back

    def page(self, request: HttpRequest) -> HttpResponse:
        """Show the reports of the chosen periods. After the user has confirmed, write them."""
        chosen = _chosen(request)
        confirmed = is_confirmed(request)
        customers = of_tokens(conf.DATABASE, chosen)
        # Without the digests of the shown reports, nothing is written: the outcome only has the reports to show.
        outcome = finalise_chosen(chosen, _digests(request) if confirmed else None)
        self._show_messages(request, outcome, customers)
        if confirmed and outcome.to_confirm:
            text = _("The reports would now differ from the reports that you have seen. Look at them again.")
            messages.warning(request, text)
        not_written = [
            (customers[token].account or _("anonymous"), start) for token, start in outcome.without_report(chosen)
        ]
        if confirmed and not outcome.to_confirm:
            for account, start in not_written[:_MAX_NAMED]:
                text = _("Not finalised: %(account)s, %(start)s. If the period is still open, the list says why.")
                values = {"account": account, "start": moment_text(start)}
                messages.warning(request, text % values)
            return HttpResponseRedirect(self._back)
        context = {
            **self._site.each_context(request),
            "title": _("Finalise periods"),
            "opts": self._opts,
            "back": self._back,
            "reports": [_previewed(preview) for preview in outcome.to_confirm],
            "not_written": [(account, moment_text(start)) for account, start in not_written],
            "chosen": chosen,
            "confirmed": CONFIRMED,
        }
        return TemplateResponse(request, "ratelimits/admin/finalise_periods.html", context)

    def _show_messages(self, request: HttpRequest, outcome: Outcome, customers: Mapping[str, NamedCustomer]) -> None:
        """Show messages about written reports and failures. Record the written reports in the log of the admin."""
        for token in outcome.failed:
            text = _("The periods of %(account)s cannot be finalised: the server's log says why.")
            messages.error(request, text % {"account": customers[token].account or _("anonymous")})
        reports = [preview.report for preview in outcome.written]
        if not reports:
            return
        assert request.user.pk is not None
        text = "finalised from the list of open periods"
        LogEntry.objects.log_actions(request.user.pk, reports, ADDITION, text, single_object=False)
        named = ", ".join(map(str, reports[:_MAX_NAMED])) + (" …" if len(reports) > _MAX_NAMED else "")
        text = ngettext(
            "%(n)s report was finalised: %(named)s.", "%(n)s reports were finalised: %(named)s.", len(reports)
        )
        messages.success(request, text % {"n": len(reports), "named": named})


def _chosen(request: HttpRequest) -> dict[str, list[int]]:
    """Return the starts of the chosen periods, by token of the customer.

    With the input `all`, the first complete periods of the list are chosen, at most MAX_CHOSEN. Otherwise, the inputs
    `period` stand for the chosen periods, and wrong inputs are left out.
    """
    chosen: dict[str, list[int]] = {}
    if request.method != "POST":
        return chosen
    if request.POST.get("all"):
        account = request.POST.get("account", "")
        if "\0" in account:  # PostgreSQL refuses a text with a null character.
            return chosen
        found = open_periods(account=account or None, awaited=True)
        complete = (period for period in found if period.complete)
        subjects = [(period.token, period.start) for period in islice(complete, MAX_CHOSEN)]
    else:
        posted = (_subject(text) for text in request.POST.getlist("period")[:MAX_CHOSEN])
        subjects = [subject for subject in posted if subject is not None]
    for token, start in subjects:
        chosen.setdefault(token, []).append(start)
    return chosen


def _subject(text: str) -> TokenAndStart | None:
    """Return the customer and the start of a period from a text of `chosen_value`; None for any other text."""
    start, _colon, token = text.partition(":")
    is_number = start.isascii() and start.isdecimal() and len(start) <= _MAX_DIGITS
    return (token, int(start)) if is_number and "\0" not in token else None


def _digests(request: HttpRequest) -> dict[TokenAndStart, str]:
    """Return the digests of the reports that the page has shown, by period."""
    digests = {}
    for text in request.POST.getlist("shown"):
        digest, _colon, rest = text.partition(":")
        subject = _subject(rest)
        if subject is not None:
            digests[subject] = digest
    return digests


def _previewed(preview: Preview) -> PreviewedReport:
    report, value = preview.report, chosen_value(*preview.subject)
    return PreviewedReport(
        account=report.account,
        period=period_text(report.period_start, report.period_end, report.timezone),
        plan=report.plan,
        lines=report.line_count,
        gaps="; ".join(in_words(report.gaps)),
        rows=total_rows(report, preview.totals),
        owed=owed(report),
        period_value=value,
        shown_value=f"{preview.digest}:{value}",
    )
