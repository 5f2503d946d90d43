"""Install the wheel and the sdist into empty environments, and use them there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.system

SITE = """
import sys
import django
from django.conf import settings
from django.http import HttpResponse
from django.urls import path

urlpatterns = [path("files/", lambda request: HttpResponse("here"))]
settings.configure(
    ALLOWED_HOSTS=["testserver"],
    SECRET_KEY="smoke",
    ROOT_URLCONF="__main__",
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "django.contrib.sessions",
        "django.contrib.messages", "django.contrib.admin", "simple_history",
        "ratelimits", "ratelimits.usage", "ratelimits.billing"],
    MIDDLEWARE=["django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware", "ratelimits.middleware.QuotaMiddleware"],
    TEMPLATES=[{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True,
        "OPTIONS": {"context_processors": ["django.template.context_processors.request",
            "django.contrib.auth.context_processors.auth", "django.contrib.messages.context_processors.messages"]}}],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "smoke.sqlite3"}},
    CACHES={"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": sys.argv[1]}},
    RATELIMITS={"NAMESPACE": "smoke", "PATHS": ["/files/"]},
    USE_TZ=True,
)
django.setup()

from django.core.management import call_command
from django.test import Client
from ratelimits.models import Rule

call_command("check")
call_command("migrate", verbosity=0)
Rule.objects.create(name="few", key_kind="ip", algorithm="fixed_window", capacity=2, period=3600)
client = Client()
print(*(client.get("/files/").status_code for _ in range(3)))
for module in ("rest_framework", "celery"):
    try:
        __import__(module)
    except ModuleNotFoundError:
        print(f"no {module}")
    else:
        import ratelimits.usage.tasks
        import ratelimits.throttling
"""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("kind", "extras", "missing"),
    [
        ("wheel", "", ["no rest_framework", "no celery"]),
        pytest.param("sdist", "[drf,celery,xlsx]", [], marks=pytest.mark.long),
    ],
)
def test_an_empty_environment_can_use_it(
    kind: str, extras: str, missing: list[str], tmp_path: Path, redis_url: str
) -> None:
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", tmp_path, cwd=ROOT)
    (built,) = tmp_path.glob("django_ratelimits-*")
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    run(*pip, "install", "--quiet", f"{built}{extras}", cwd=tmp_path)
    (tmp_path / "smoke.py").write_text(SITE)
    printed = run(python, "-W", "error", "smoke.py", redis_url, cwd=tmp_path).splitlines()
    assert "no issues" in printed[0]
    assert printed[-1 - len(missing) :] == ["200 200 429", *missing]
