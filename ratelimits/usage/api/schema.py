"""The OpenAPI schema of `/usage/`, for projects that use drf-spectacular."""

from __future__ import annotations

from typing import cast

from drf_spectacular.extensions import OpenApiViewExtension
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiResponse, extend_schema
from rest_framework.views import APIView

from ratelimits.usage.api.serializers import UsagePage, UsageQuery


class UsageViewSchema(OpenApiViewExtension):  # type: ignore[no-untyped-call]
    """The schema of `/usage/`: its parameters and responses."""

    target_class = "ratelimits.usage.api.views.UsageView"

    def view_replacement(self) -> type[APIView]:
        # drf-spectacular has replaced the name in `target_class` by the class itself.
        target = cast("type[APIView]", self.target_class)

        class ViewWithSchema(target):  # type: ignore[valid-type, misc]
            @extend_schema(
                operation_id="usage",
                parameters=[UsageQuery],
                responses={
                    200: UsagePage,
                    400: OpenApiResponse(OpenApiTypes.OBJECT, "The errors, by parameter."),
                    403: OpenApiResponse(
                        OpenApiTypes.OBJECT,
                        "The caller asked for another account's usage, has no account, or cannot view ledger lines.",
                    ),
                    429: OpenApiResponse(OpenApiTypes.OBJECT, "A rule of the scope `usage` refused the request."),
                },
            )
            def get(self, *args: object, **kwargs: object) -> object:
                return super().get(*args, **kwargs)

        ViewWithSchema.__doc__ = target.__doc__
        return ViewWithSchema
