"""What README.md tells people to do is done here, word for word."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def snippet(name: str) -> str:
    (found,) = [block for block in blocks("python") if block.startswith(f"# {name}\n")]
    return found


SETTINGS = """
from pathlib import Path
SECRET_KEY = "x"
ALLOWED_HOSTS = ["testserver"]
ROOT_URLCONF = "shop.urls"
USE_TZ = True
INSTALLED_APPS = [
    "django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes", "django.contrib.sessions",
    "django.contrib.messages", "rest_framework",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [{
    "BACKEND": "django.template.backends.django.DjangoTemplates",
    "APP_DIRS": True,
    "OPTIONS": {"context_processors": [
        "django.template.context_processors.request",
        "django.contrib.auth.context_processors.auth",
        "django.contrib.messages.context_processors.messages",
    ]},
}]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": Path(__file__).parent / "shop.sqlite3"}}
CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
REST_FRAMEWORK = {}
"""

URLS = """
from django.contrib import admin
from django.urls import path
from shop.views import Search
urlpatterns = [path("admin/", admin.site.urls), path("search/", Search.as_view())]
"""

SESSION = """
import json
import django
django.setup()
from django.contrib.auth.models import User
from django.test import Client
from ratelimits.models import Line, Rule
from ratelimits.tasks import drain, seal
from shop.celery import app

Rule.objects.create(
    name="burst", scope="search", key_kind="user", algorithm="token_bucket", capacity=10, rate=5, period=1
)
Rule.objects.create(
    name="words", meter="tokens", key_kind="user", algorithm="token_bucket", capacity=4, rate=1, period=3600
)
client = Client()
client.force_login(User.objects.create(username="ada"))
first = client.get("/search/", {"q": "three words long"})
second = client.get("/search/", {"q": "two more"})
seal()
drain()
app.finalize()
print(json.dumps({
    "statuses": [first.status_code, second.status_code],
    "policy": first["RateLimit-Policy"],
    "standing": first["RateLimit"],
    "lines": sorted(Line.objects.filter(admitted_units__gt=0).values_list("meter", "admitted_units")),
    "schedule": sorted(app.conf.beat_schedule),
}))
"""


@pytest.fixture
def shop(tmp_path: Path, redis_url: str) -> Path:
    """A project with Django REST framework, to which the five steps were done."""
    package = tmp_path / "shop"
    package.mkdir()
    settings = snippet("settings.py")
    server = urlsplit(redis_url).netloc
    assert "redis://127.0.0.1:6379/1" in settings
    (package / "settings.py").write_text(SETTINGS + settings.replace("127.0.0.1:6379", server))
    (package / "views.py").write_text(snippet("views.py"))
    (package / "celery.py").write_text(snippet("celery.py"))
    (package / "urls.py").write_text(URLS)
    return tmp_path


def run(shop: Path, *arguments: str) -> str:
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "shop.settings", "PYTHONPATH": f"{shop}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=shop, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_five_steps_limit_meter_and_bill_an_existing_project(shop: Path) -> None:
    assert "no issues" in run(shop, "-m", "django", "check")
    run(shop, "-m", "django", "migrate", "--verbosity", "0")
    seen = json.loads(run(shop, "-c", SESSION))
    assert seen["statuses"] == [200, 429]
    assert '"burst";q=10;w=2' in seen["policy"]
    assert seen["standing"] == '"words";r=1;t=10800'
    assert seen["lines"] == [["requests", 1], ["tokens", 3]]
    assert {"ratelimits.drain", "ratelimits.seal"} <= set(seen["schedule"])


def test_each_of_the_two_set_up_commands_stands_alone() -> None:
    demo, tests = blocks("sh")
    for command in (demo, tests):
        assert command.count("\n") == 1
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install -r requirements.txt && ")
    assert demo.endswith(".venv/bin/python manage.py demo\n")
    assert tests.endswith(".venv/bin/python -m pytest\n")


def test_every_link_leads_to_a_file() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    targets = [
        (page, target) for page in pages for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    ]
    assert targets
    assert [f"{page.name}: {target}" for page, target in targets if not (page.parent / target).exists()] == []
