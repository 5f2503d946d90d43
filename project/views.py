from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from ratelimits.models import Plan, Rule


def home(request: HttpRequest) -> HttpResponse:
    """Show the rules as sentences, the plans, and links to the API and the admin."""
    rules = Rule.objects.select_related("plan").order_by("plan__name", "name")
    plans = Plan.objects.prefetch_related("inclusions")
    return render(request, "project/home.html", {"rules": rules, "plans": plans})
