"""The OpenAPI schema of `/usage/report/`, for projects that use drf-spectacular."""

from __future__ import annotations

from typing import cast

from drf_spectacular.extensions import OpenApiViewExtension
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiResponse, extend_schema
from rest_framework.views import APIView

from ratelimits.billing.api.views import ReportQuery
from ratelimits.billing.reports.exports import DOWNLOADS


class ReportViewSchema(OpenApiViewExtension):  # type: ignore[no-untyped-call]
    """The schema of `/usage/report/`: its parameters, files and error responses."""

    target_class = "ratelimits.billing.api.views.ReportView"

    def view_replacement(self) -> type[APIView]:
        target = cast("type[APIView]", self.target_class)

        class ViewWithSchema(target):  # type: ignore[valid-type, misc]
            @extend_schema(
                operation_id="usage_report",
                parameters=[ReportQuery],
                responses={
                    # For each file format: the status and the content type, without the charset.
                    **{
                        (200, file_format.content_type.partition(";")[0]): OpenApiTypes.BINARY
                        for file_format in DOWNLOADS.values()
                    },
                    400: OpenApiResponse(OpenApiTypes.OBJECT, "The errors, by parameter."),
                    403: OpenApiResponse(
                        OpenApiTypes.OBJECT,
                        "The caller asked for another account's report, has no account, or cannot view reports.",
                    ),
                    429: OpenApiResponse(OpenApiTypes.OBJECT, "A rule of the scope `usage` refused the request."),
                },
            )
            def get(self, *args: object, **kwargs: object) -> object:
                return super().get(*args, **kwargs)

        ViewWithSchema.__doc__ = target.__doc__
        return ViewWithSchema
