"""The pages of rules and limits in the Django admin."""

from __future__ import annotations

from django.contrib import admin

from ratelimits.admin import accounts
from ratelimits.admin.changes import page as changes
from ratelimits.admin.inspect import page as inspector
from ratelimits.admin.operate import access, resets
from ratelimits.admin.rule_form import overrides, rules
from ratelimits.admin.status import page as status
from ratelimits.admin.status import tags

__all__ = ["access", "accounts", "changes", "inspector", "overrides", "resets", "rules", "status", "tags"]

# The app's index page shows the status, and lists the tables in the order in which people use them. If a project
# has set an index template, the project's template stays. The app's templates have other file names than Django's: with
# Django's names, the order of `INSTALLED_APPS` would decide which template is used.
if admin.site.index_template is None:
    admin.site.index_template = "ratelimits/admin/index.html"
if admin.site.app_index_template is None:
    admin.site.app_index_template = "ratelimits/admin/app_index.html"
