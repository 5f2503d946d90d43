"""The page that Prometheus scrapes."""

from __future__ import annotations

from importlib import import_module

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe

from ratelimits.conf import conf


@require_safe
def metrics(request: HttpRequest) -> HttpResponse:
    """Return all metrics in Prometheus's text format. Raise ImproperlyConfigured if TELEMETRY does not name Prometheus.

    Anyone who reaches the page can read the names of rules. So let only the scraper reach it.
    """
    if "prometheus" not in conf.TELEMETRY:
        raise ImproperlyConfigured('Add "prometheus" to RATELIMITS["TELEMETRY"] to serve this page.')
    page = import_module("ratelimits.telemetry.prometheus").exposition()
    return HttpResponse(page, content_type="text/plain; version=1.0.0; charset=utf-8")
