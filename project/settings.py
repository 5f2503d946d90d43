"""The settings of the demo project.

The environment variables REDIS_URL and DATABASE_URL name the Redis server and the database. By default, these are a
Redis server on this machine and a SQLite file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import dj_database_url

BASE_DIR = Path(__file__).resolve().parent.parent
DATA_DIR = Path(os.environ.get("DEMO_DATA_DIR", BASE_DIR / ".demo"))
DATA_DIR.mkdir(parents=True, exist_ok=True)

SECRET_KEY = os.environ.get("SECRET_KEY", "the demo's key: set another one in production")
DEBUG = os.environ.get("DEBUG", "") == "1"
ALLOWED_HOSTS = os.environ.get("ALLOWED_HOSTS", "127.0.0.1,localhost,[::1],testserver").split(",")

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "whitenoise.runserver_nostatic",
    "django.contrib.staticfiles",
    "rest_framework",
    "drf_spectacular",
    "simple_history",
    "ratelimits",
    "ratelimits.usage",
    "ratelimits.billing",
    "project",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.locale.LocaleMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "ratelimits.middleware.QuotaMiddleware",
    "simple_history.middleware.HistoryRequestMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
ROOT_URLCONF = "project.urls"
WSGI_APPLICATION = "project.wsgi.application"
ASGI_APPLICATION = "project.asgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
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
WHITENOISE_USE_FINDERS = True
LANGUAGE_CODE = "en"
LANGUAGES = [("en", "English"), ("zh-hans", "简体中文")]
TIME_ZONE = "UTC"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

DATABASES: dict[str, Any] = {
    "default": dj_database_url.config(default=f"sqlite:///{DATA_DIR / 'db.sqlite3'}", conn_max_age=60)
}
if DATABASES["default"]["ENGINE"] == "django.db.backends.sqlite3":
    # A web server and a worker write at the same time. With this timeout they wait for each other.
    DATABASES["default"]["OPTIONS"] = {
        "transaction_mode": "IMMEDIATE",
        "timeout": 20,
        "init_command": "PRAGMA journal_mode=WAL",
    }

REDIS_URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0")


def redis_database(offset: int) -> str:
    """Return REDIS_URL with its database number increased by `offset`. REDIS_URL can name a Unix socket."""
    parts = urlsplit(REDIS_URL)
    if parts.scheme == "unix":
        return f"unix://{parts.path}?db={int(parts.query.removeprefix('db=') or 0) + offset}"
    number = int(parts.path.strip("/") or 0) + offset
    return urlunsplit(parts._replace(path=f"/{number}"))


# `cache.clear()` of django-redis empties a whole Redis database. So the limits have a database of their own.
CACHES = {
    "ratelimits": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": redis_database(0)},
    "default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": redis_database(1)},
}

# For Celery, the URL of a Unix socket has another form.
CELERY_BROKER_URL = redis_database(2).replace("unix://", "redis+socket://").replace("?db=", "?virtual_host=")
CELERY_TASK_IGNORE_RESULT = True
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_TIMEZONE = "UTC"

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "project.authentication.ApiKeyAuthentication",
        "rest_framework.authentication.SessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAuthenticated"],
    "DEFAULT_THROTTLE_CLASSES": ["ratelimits.throttling.QuotaThrottle"],
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "NUM_PROXIES": 0,
}
SPECTACULAR_SETTINGS = {"TITLE": "The demo API", "VERSION": "1", "SERVE_INCLUDE_SCHEMA": False}

RATELIMITS: dict[str, Any] = {
    "CACHE_ALIAS": "ratelimits",
    "NAMESPACE": os.environ.get("RATELIMITS_NAMESPACE", "demo"),
    "DENY_CACHE_SECONDS": float(os.environ.get("RATELIMITS_DENY_CACHE_SECONDS", "1")),
    "TIMEOUT": float(os.environ.get("RATELIMITS_TIMEOUT", "0.25")),
    "ACCOUNT": "project.authentication.account_of",
    "KEY_SEARCH": "project.authentication.find_keys",
    # Intervals in seconds. They are short, so that the demo is fast. In production, use the defaults. Do not make
    # DRAIN_INTERVAL shorter: on Redis 6.2, a drain waits two seconds for an fsync of the server, and the worker also
    # needs time to seal.
    "SEAL_INTERVAL": 1,
    "DRAIN_INTERVAL": 3,
    # The command `demo` sets this to 1 (all accounts), so that rules can be tried on its requests.
    "RECORD_SAMPLE": float(os.environ.get("RATELIMITS_RECORD_SAMPLE", "0")),
}
