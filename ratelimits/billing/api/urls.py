"""URL patterns of bills. With `path("", include("ratelimits.billing.api.urls"))`, a project has `/usage/report/`."""

from __future__ import annotations

from importlib.util import find_spec

from django.urls import path

from ratelimits.billing.api.views import ReportView

if find_spec("drf_spectacular") is not None:
    from ratelimits.billing.api import schema  # noqa: F401  (drf-spectacular finds the imported extension)

app_name = "ratelimits_billing"
urlpatterns = [path("usage/report/", ReportView.as_view(), name="report")]
