"""Downloads of reports in the admin: a single version of a report, or all usage of a month."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import (
    Http404,
    HttpRequest,
    HttpResponse,
    HttpResponseBase,
    HttpResponseRedirect,
)
from django.urls import URLPattern, path, reverse

from ratelimits import moments
from ratelimits.models import Report
from ratelimits.reports.exports import Format, installed
from ratelimits.reports.exports.download import ReportDownload, file_stem
from ratelimits.reports.rows import FINAL
from ratelimits.reports.statements import columns_of, newest_columns, statement, statements, versions
from ratelimits.reports.statements.charges import lines_for

if TYPE_CHECKING:
    _Base = admin.ModelAdmin[Report]
else:
    _Base = object


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
            path("download/", view(self.download_month_view), name="ratelimits_report_download_month"),
            path("<int:pk>/download/", view(self.download_view), name="ratelimits_report_download"),
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
        name = file_stem(report.account, report.period_start, report.version)
        file_format = _format(request)
        return ReportDownload(
            file_format, lines_for(file_format, [statement(report)]), newest_columns(versions(report)), name
        )

    def download_month_view(self, request: HttpRequest) -> HttpResponseBase:
        """Return the usage of all billing periods that start in a month, as a file.

        `?period=` is the month, and `?format=` is the format. `?final=1` leaves out periods that are not finalised yet.
        """
        if not self.has_view_permission(request):
            raise PermissionDenied
        month = request.GET.get("period", "")
        try:
            columns_version = columns_of(month)
            selected = statements(month, columns_version=columns_version)
        except ValueError as error:
            self.message_user(request, str(error), messages.ERROR)
            return HttpResponseRedirect(reverse(f"{self.admin_site.name}:ratelimits_report_changelist"))
        name = f"usage-{month}"
        if request.GET.get("final"):
            selected = (statement for statement in selected if statement.status == FINAL)
            name += "-final"
        file_format = _format(request)
        return ReportDownload(file_format, lines_for(file_format, selected), columns_version, name)


def _format(request: HttpRequest) -> Format:
    name = request.GET.get("format", "csv")
    for file_format in installed():
        if file_format.name == name:
            return file_format
    raise Http404(f"there is no format {name!r}")
