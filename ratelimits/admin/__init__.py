"""The app's pages in the Django admin."""

from __future__ import annotations

from django.contrib import admin

from ratelimits.admin import accounts, adjustments, alerts, push, reports, rules, usage
from ratelimits.admin.changes import page as changes
from ratelimits.admin.inspect import page as inspector
from ratelimits.admin.operate import access, resets
from ratelimits.admin.status import page as status

__all__ = [
    "access",
    "accounts",
    "adjustments",
    "alerts",
    "changes",
    "inspector",
    "push",
    "reports",
    "resets",
    "rules",
    "status",
    "usage",
]

# The app's index shows the status, and the tables in the order of work. A project that sets its own index keeps it. The
# templates have other names than Django's: overriding Django's would depend on the order of INSTALLED_APPS.
if admin.site.index_template is None:
    admin.site.index_template = "ratelimits/admin/index.html"
if admin.site.app_index_template is None:
    admin.site.app_index_template = "ratelimits/admin/app_index.html"
