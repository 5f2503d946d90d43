"""Django's settings for the benchmarks of pages: the settings of the other benchmarks, and the admin."""

from __future__ import annotations

from django.apps import AppConfig

from benchmarks.support.settings import *  # noqa: F403
from benchmarks.support.settings import INSTALLED_APPS, RATELIMITS

INSTALLED_APPS += [
    "django.contrib.admin",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
]
# Also make the tables of the added apps without migrations.
MIGRATION_MODULES = {AppConfig.create(name).label: None for name in INSTALLED_APPS}
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
STATIC_URL = "static/"
ROOT_URLCONF = "benchmarks.pages.urls"
# The default of the app. The benchmark measures the time that a hanging server adds, and this time depends on TIMEOUT.
RATELIMITS["TIMEOUT"] = 0.25
