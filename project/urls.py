from __future__ import annotations

from django.contrib import admin
from django.urls import include, path
from drf_spectacular.views import SpectacularAPIView

from project.api import StreamView, TextView, TimeView
from project.views import home

urlpatterns = [
    path("", home, name="home"),
    path("admin/", admin.site.urls),
    path("api/schema/", SpectacularAPIView.as_view(throttle_classes=[]), name="schema"),
    path("api/time/", TimeView.as_view(), name="time"),
    path("api/stream/", StreamView.as_view(), name="stream"),
    path("api/text/", TextView.as_view(), name="text"),
    path("", include("ratelimits.usage.api.urls")),
    path("", include("ratelimits.billing.api.urls")),
]
