"""URL patterns of the API. With `path("", include("ratelimits.usage.api.urls"))`, a project has the URL `/usage/`."""

from __future__ import annotations

from importlib.util import find_spec

from django.urls import path

from ratelimits.usage.api.views import UsageView

if find_spec("drf_spectacular") is not None:
    from ratelimits.usage.api import schema  # noqa: F401  (drf-spectacular finds the imported extension)

app_name = "ratelimits"
urlpatterns = [path("usage/", UsageView.as_view(), name="usage")]
