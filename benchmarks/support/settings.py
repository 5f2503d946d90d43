"""Django's settings for the benchmarks. benchmarks.support.servers sets the environment variables that they need."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import dj_database_url
from django.apps import AppConfig

_REDIS = os.environ["BENCHMARK_REDIS_URL"]

SECRET_KEY = "benchmarks"
ALLOWED_HOSTS = ["*"]
INSTALLED_APPS = [
    "django.contrib.contenttypes",
    "django.contrib.auth",
    "rest_framework",
    "simple_history",
    "ratelimits",
    "ratelimits.usage",
    "ratelimits.billing",
]
if importlib.util.find_spec("django_smart_ratelimit"):
    INSTALLED_APPS.append("django_smart_ratelimit")
# Make the tables from the models without migrations, which takes a third of the time.
MIGRATION_MODULES = {AppConfig.create(name).label: None for name in INSTALLED_APPS}
MIDDLEWARE: list[str] = []
ROOT_URLCONF = "benchmarks.support.views"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES: dict[str, Any] = {"default": dj_database_url.parse(os.environ["BENCHMARK_DATABASE_URL"], conn_max_age=None)}
if DATABASES["default"]["ENGINE"] == "django.db.backends.sqlite3":
    # The same options as in the demo project.
    DATABASES["default"]["OPTIONS"] = {
        "transaction_mode": "IMMEDIATE",
        "timeout": 20,
        "init_command": "PRAGMA journal_mode=WAL",
    }
CACHES = {
    "ratelimits": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": f"{_REDIS}/0"},
    # The cache for other packages that count in Django's cache.
    "default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": f"{_REDIS}/1"},
}
REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [],
    "DEFAULT_PERMISSION_CLASSES": [],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "NUM_PROXIES": 0,
}
RATELIMITS = {
    "CACHE_ALIAS": "ratelimits",
    "NAMESPACE": os.environ.get("BENCHMARK_NAMESPACE", "bench"),
    # A long timeout: a slow moment of the machine should appear in the p99, and not start the failure policy.
    "TIMEOUT": 10.0,
    # Read the rules only once, because nobody edits them during a benchmark.
    "RELOAD_INTERVAL": 3600,
}

# Settings of other packages.
RATELIMIT_BACKEND = "redis"
RATELIMIT_REDIS = {"host": "127.0.0.1", "port": int(_REDIS.rsplit(":", 1)[1]), "db": 2}
SILENCED_SYSTEM_CHECKS = ["django_ratelimit.E003", "django_ratelimit.W001"]
