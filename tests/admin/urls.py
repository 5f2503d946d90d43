"""URLs of the admin, and of a view with a fixed cost in one meter."""

from __future__ import annotations

from django.contrib import admin
from django.urls import path
from rest_framework.views import APIView


class Search(APIView):
    throttle_scope = "search"
    throttle_cost = {"tokens": 250}


urlpatterns = [path("admin/", admin.site.urls), path("search/", Search.as_view())]
