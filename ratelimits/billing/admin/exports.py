"""Downloads of reports in the admin: a single version of a report, or all usage of a month."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import (
    Http404,
    HttpRequest,
    HttpResponse,
    HttpResponseBase,
    HttpResponseRedirect,
)
from django.urls import NoReverseMatch, URLPattern, path, reverse
from django.utils.html import format_html_join
from django.utils.translation import gettext as _

from ratelimits import moments
from ratelimits.billing.models import Report
from ratelimits.billing.reports.closing.open_periods import open_periods
from ratelimits.billing.reports.exports import Format, installed
from ratelimits.billing.reports.exports.download import ReportDownload, file_stem
from ratelimits.billing.reports.rows import FINAL
from ratelimits.billing.reports.statements import columns_of, newest_columns, statement, statements, versions
from ratelimits.billing.reports.statements.charges import lines_for
from ratelimits.billing.reports.statements.gained import Gain, gains
from ratelimits.billing.reports.statements.unstated import Unstated, unstated
from ratelimits.conf import conf
from ratelimits.usage.admin.ledger import month_text

if TYPE_CHECKING:
    _Base = admin.ModelAdmin[Report]
else:
    _Base = object


#: Maximum number of periods that messages name because a file lacks them.
_MAX_NAMED = 5


class ReportDownloads(_Base):
    """Mixin for the admin page of reports.

    The page of a report has links to downloads. Above the list of reports, users choose a month to download. Users who
    may view a report may download it.
    """

    change_form_template = "ratelimits/admin/report_change_form.html"
    change_list_template = "ratelimits/admin/report_change_list.html"

    def get_urls(self) -> list[URLPattern]:
        """Return the URLs. The URLs of downloads come first, because Django's last URL pattern matches every path."""
        view = self.admin_site.admin_view
        return [
            path("download/", view(self.download_month_view), name="ratelimits_billing_report_download_month"),
            path("<int:pk>/download/", view(self.download_view), name="ratelimits_billing_report_download"),
            *super().get_urls(),
        ]

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        context = {"download_formats": installed()} | (extra_context or {})
        return super().change_view(request, object_id, form_url, context)

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        # Suggest the month of the list's filter. Without a filter, suggest the previous month.
        previous = moments.now().replace(day=1) - timedelta(days=1)
        month = request.GET.get("month") or f"{previous:%Y-%m}"
        context = {"download_formats": installed(), "download_month": month} | (extra_context or {})
        return super().changelist_view(request, context)

    def download_view(self, request: HttpRequest, pk: int) -> HttpResponseBase:
        """Return a version of a report as a file. `?format=` names the format (by default CSV)."""
        report = self.get_object(request, str(pk))
        if not self.has_view_permission(request, report):
            raise PermissionDenied
        if report is None:
            raise Http404(f"there is no report {pk}")
        name = file_stem(report)
        file_format = _format(request)
        return ReportDownload(
            file_format, lines_for(file_format, [statement(report)]), newest_columns(versions(report)), name
        )

    def download_month_view(self, request: HttpRequest) -> HttpResponseBase:
        """Return the usage of all billing periods of a month, as a file.

        `?period=` is the month, and `?format=` is the format. `?final=1` leaves out periods that are not finalised yet.
        If the file would lack periods, or requests that were not counted, messages first name them and say why. They
        also name earlier months whose files have gained reports. With `?lacking=1`, return the file.
        """
        if not self.has_view_permission(request):
            raise PermissionDenied
        month = request.GET.get("period", "")
        try:
            columns_version = columns_of(month)
            selected = statements(month, columns_version=columns_version)
        except ValueError as error:
            self.message_user(request, str(error), messages.ERROR)
            return HttpResponseRedirect(reverse(f"{self.admin_site.name}:ratelimits_billing_report_changelist"))
        name = f"usage-{month}"
        if not request.GET.get("lacking") and self._says_what_lacks(request, month):
            reports = reverse(f"{self.admin_site.name}:ratelimits_billing_report_changelist")
            return HttpResponseRedirect(f"{reports}?{urlencode({'month': month})}")
        if request.GET.get("final"):
            selected = (statement for statement in selected if statement.status == FINAL)
            name += "-final"
        file_format = _format(request)
        return ReportDownload(file_format, lines_for(file_format, selected), columns_version, name)

    def _says_what_lacks(self, request: HttpRequest, month: str) -> bool:
        """Name what a file of a month lacks, and why: requests that no report states, and periods that are not final.

        Also name earlier months whose files have gained reports. Return whether there is something.
        """
        is_final = bool(request.GET.get("final"))
        lacking = list(islice(open_periods(month=month), _MAX_NAMED + 1)) if is_final else []
        not_stated = list(unstated(conf.DATABASE, month))
        gained = list(gains(conf.DATABASE, month))
        if not lacking and not not_stated and not gained:
            return False
        for found in not_stated:
            self.message_user(request, _unstated_text(found), messages.WARNING)
        for period in lacking[:_MAX_NAMED]:
            text = _("The file lacks %(account)s, %(period)s: %(why)s.")
            values = {"account": period.account or _("anonymous"), "period": month_text(month), "why": period.why}
            self.message_user(request, text % values, messages.WARNING)
        for gain in gained:
            self.message_user(request, _gain_text(gain, month), messages.WARNING)
        links = [
            (
                reverse(f"{self.admin_site.name}:ratelimits_billing_report_download_month"),
                urlencode({**request.GET.dict(), "lacking": 1}),
                _("Download the file without them") if lacking else _("Download the file"),
            )
        ]
        if not lacking:
            self.message_user(request, format_html_join("", '<a href="{}?{}">{}</a>', links), messages.WARNING)
            return True
        with suppress(NoReverseMatch):  # Perhaps the project has its own page of reports, without this list.
            all_of_month = _("All open periods of %(month)s") % {"month": month_text(month)}
            url = reverse(f"{self.admin_site.name}:ratelimits_billing_report_open")
            links.append((url, urlencode({"month": month}), all_of_month))
        self.message_user(request, format_html_join(" · ", '<a href="{}?{}">{}</a>', links), messages.WARNING)
        return True


def _gain_text(gain: Gain, month: str) -> str:
    text = _(
        "Since %(since)s began (UTC), the file of %(month)s has gained reports (corrections: %(corrections)s; late"
        " first reports: %(first)s). The newest was made at %(newest)s. If your file is older, download it again."
    )
    return text % {
        "since": month_text(month),
        "month": month_text(gain.month),
        "corrections": f"{gain.corrections:,}",
        "first": f"{gain.late_first_reports:,}",
        "newest": f"{moments.local(gain.newest):%Y-%m-%d %H:%M:%S %Z}",
    }


def _unstated_text(found: Unstated) -> str:
    names = [name or _("anonymous") for name in found.names] + ["…"] * (found.accounts > len(found.names))
    text = (
        _("%(what)s: %(requests)s requests of accounts that no report states: %(accounts)s.")
        if found.requests.is_exact
        else _("%(what)s: at least %(requests)s requests of accounts that no report states: %(accounts)s.")
    )
    what = str(found.kind.label)
    return text % {
        "what": what[:1].upper() + what[1:],
        "requests": f"{found.requests.number:,}",
        "accounts": ", ".join(names),
    }


def _format(request: HttpRequest) -> Format:
    name = request.GET.get("format", "csv")
    for file_format in installed():
        if file_format.name == name:
            return file_format
    raise Http404(f"there is no format {name!r}")
