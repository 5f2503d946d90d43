"""The view of `/usage/report/`: the report of a month as a file."""

from __future__ import annotations

from django.http import HttpResponseBase
from rest_framework import serializers
from rest_framework.permissions import IsAuthenticated
from rest_framework.request import Request
from rest_framework.views import APIView

from ratelimits.billing.reports.exports import DOWNLOADS, Format
from ratelimits.billing.reports.exports.download import ReportDownload
from ratelimits.billing.reports.statements import columns_of, statements
from ratelimits.billing.reports.statements.charges import lines_for
from ratelimits.usage.api.serializers import MAX_TEXT, Query
from ratelimits.usage.api.views import UnbilledThrottle, parameters_of, wanted_identity
from ratelimits.usage.periods import checked_month


class ReportQuery(Query):
    period = serializers.CharField(max_length=7, help_text="A month such as 2026-10.")
    file = serializers.ChoiceField(choices=sorted(DOWNLOADS), default="csv", help_text="Format of the file.")
    account = serializers.CharField(
        required=False,
        max_length=MAX_TEXT,
        help_text="Identifier of an account. Staff can name any account, or the token of a customer. Customers can"
        " name only their own account.",
    )

    def validate_period(self, month: str) -> str:
        """Return the month. Raise ValidationError if the text is not a month."""
        try:
            checked_month(month)
        except ValueError as error:
            raise serializers.ValidationError(str(error)) from error
        return month

    def validate_file(self, name: str) -> Format:
        """Return the format. Raise ValidationError if the library for this format is not installed."""
        if DOWNLOADS[name].missing:
            raise serializers.ValidationError(DOWNLOADS[name].missing)
        return DOWNLOADS[name]


class ReportView(APIView):
    """Return the report of a month as a file.

    The report contains the billing periods whose last moment is in the month. Finalised periods have the numbers of
    their newest report. Open periods have provisional numbers. Customers get their own reports, under all accounts that
    ever named them. Staff who may view reports get the reports of all customers, or of the customer that `account`
    names.
    """

    permission_classes = [IsAuthenticated]
    throttle_classes = [UnbilledThrottle]
    throttle_scope = "usage"

    def get(self, request: Request) -> HttpResponseBase:
        parameters = parameters_of(request, ReportQuery)
        identity = wanted_identity(request, parameters, "ratelimits_billing.view_report")
        account, month = identity.account_id or None, parameters["period"]
        file_format = parameters["file"]
        columns_version = columns_of(month, account=account)
        reports = statements(month, account=account, columns_version=columns_version)
        return ReportDownload(file_format, lines_for(file_format, reports), columns_version, f"usage-{month}")
