"""Do what docs/moving.md tells people to do, word for word."""

from __future__ import annotations

import json
import re
from difflib import unified_diff
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.contrib.auth.models import AnonymousUser, User
from django.http import HttpResponse
from django.test import RequestFactory

from ratelimits import as_code
from ratelimits.identity import Identity
from ratelimits.quota.checking import check
from tests.support.entry_points import begin_afresh
from tests.support.fresh import Project
from tests.support.rows import rule
from tests.support.servers import TestServers

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "moving.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+)\n((?:(?!^## ).*\n?)*)", PAGE, re.MULTILINE))
MAX_CHANGED_LINES = 4

#: A small project after Django REST framework's tutorial and its page about throttling. Its own limits are small.
TUTORIAL = {
    "settings.py": """\
INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes", "rest_framework", "snippets"]
SECRET_KEY = "tutorial"
ALLOWED_HOSTS = ["*"]
USE_TZ = True
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "db.sqlite3"}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
ROOT_URLCONF = "urls"
REST_FRAMEWORK = {
    "DEFAULT_THROTTLE_CLASSES": [
        "rest_framework.throttling.AnonRateThrottle",
        "rest_framework.throttling.UserRateThrottle",
    ],
    "DEFAULT_THROTTLE_RATES": {"anon": "3/day", "user": "5/day", "burst": "2/min", "users": "4/hour"},
    "DEFAULT_AUTHENTICATION_CLASSES": ["rest_framework.authentication.BasicAuthentication"],
    "NUM_PROXIES": 0,
}
""",
    "urls.py": """\
from django.urls import include, path
from rest_framework.routers import DefaultRouter
from snippets import views

router = DefaultRouter()
router.register("snippets", views.SnippetViewSet)
router.register("users", views.UserViewSet)
urlpatterns = [path("", include(router.urls))]
""",
    "snippets/__init__.py": "",
    "snippets/models.py": """\
from django.db import models


class Snippet(models.Model):
    title = models.CharField(max_length=100, blank=True)
    code = models.TextField()
    owner = models.ForeignKey("auth.User", models.CASCADE, related_name="snippets")

    class Meta:
        ordering = ["pk"]
""",
    "snippets/serializers.py": """\
from django.contrib.auth.models import User
from rest_framework import serializers
from snippets.models import Snippet


class SnippetSerializer(serializers.HyperlinkedModelSerializer):
    owner = serializers.ReadOnlyField(source="owner.username")

    class Meta:
        model = Snippet
        fields = ["url", "title", "code", "owner"]


class UserSerializer(serializers.ModelSerializer):
    class Meta:
        model = User
        fields = ["id", "username"]
""",
    "snippets/throttles.py": """\
from rest_framework.throttling import ScopedRateThrottle, UserRateThrottle


class BurstThrottle(UserRateThrottle):
    scope = "burst"


class UsersThrottle(ScopedRateThrottle):
    pass
""",
    "snippets/views.py": """\
from django.contrib.auth.models import User
from rest_framework import permissions, viewsets
from rest_framework.decorators import action
from rest_framework.response import Response
from snippets.models import Snippet
from snippets.serializers import SnippetSerializer, UserSerializer
from snippets.throttles import BurstThrottle, UsersThrottle


class SnippetViewSet(viewsets.ModelViewSet):
    queryset = Snippet.objects.all()
    serializer_class = SnippetSerializer
    permission_classes = [permissions.IsAuthenticatedOrReadOnly]

    @action(detail=False, throttle_classes=[BurstThrottle])
    def newest(self, request):
        return Response([])

    def perform_create(self, serializer):
        serializer.save(owner=self.request.user)


class UserViewSet(viewsets.ReadOnlyModelViewSet):
    queryset = User.objects.order_by("pk")
    serializer_class = UserSerializer
    throttle_classes = [UsersThrottle]
    throttle_scope = "users"
""",
}
#: A script that makes the tables of the tutorial and a user. The moved project needs no further tables.
PREPARE = """
from django.contrib.auth.models import User
from django.core.management import call_command

call_command("migrate", verbosity=0, run_syncdb=True)
User.objects.create_user("ada", password="lovelace")
"""
#: A script that makes requests, and prints the statuses and the last Retry-After of each kind.
VISIT = """
import json
from base64 import b64encode
from django.test import Client

client, seen = Client(), {}
ada = {"Authorization": "Basic " + b64encode(b"ada:lovelace").decode()}
for name, path, headers, data in (
    ("anon", "/snippets/", {}, None),
    ("user", "/snippets/", ada, {"code": "print(1)"}),
    ("burst", "/snippets/newest/", ada, None),
    ("users", "/users/", ada, None),
):
    method = client.post if data else client.get
    answers = [method(path, data, headers=headers) for _ in range(6)]
    seen[name] = [answer.status_code for answer in answers], int(answers[-1]["Retry-After"])
print(json.dumps(seen))
"""
IMPORT = """
from django.core.management import call_command

call_command("migrate", verbosity=0)
call_command("ratelimits_import")
call_command("ratelimits_import", "--write")
call_command("ratelimits_rules", "dump")
"""


def blocks(section: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", SECTIONS[section], re.MULTILINE | re.DOTALL)


def moved(files: dict[str, str]) -> dict[str, str]:
    """Return the files after the section about Django REST framework was followed."""
    section = "Django REST framework's throttles"
    renamed = re.findall(r"^\| `(rest_framework\.\S+)` \| `(\S+)` \|$", SECTIONS[section], re.MULTILINE)
    assert len(renamed) == 4
    modules = {(old.rpartition(".")[0], new.rpartition(".")[0]) for old, new in renamed}
    ((old_module, new_module),) = modules
    new = {name: text.replace(old_module, new_module) for name, text in files.items()}
    (lines,) = blocks(section, "python")
    comment, _newline, lines = lines.partition("\n")
    name = comment.removeprefix("# ")
    return {**new, name: new[name] + lines}


def changed_lines(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """Return the lines that a diff adds."""
    lines = [
        line
        for name in old
        for line in unified_diff(old[name].splitlines(), new[name].splitlines(), name, name, lineterm="", n=0)
    ]
    return [line for line in lines if line.startswith("+") and not line.startswith("+++")]


def test_the_tutorial_moves_with_four_changed_lines_and_refuses_as_before(
    tmp_path: Path, servers: TestServers, redis_url: str
) -> None:
    new = moved(TUTORIAL)
    changed = changed_lines(TUTORIAL, new)
    assert 0 < len(changed) <= MAX_CHANGED_LINES, changed

    project = Project(tmp_path, servers)
    outputs = []
    with_app = {
        "settings.py": new["settings.py"]
        + 'INSTALLED_APPS += ["simple_history", "ratelimits", "ratelimits.usage", "ratelimits.billing"]\n'
    }
    for files, script in ((TUTORIAL, PREPARE + VISIT), (new, VISIT), (with_app, IMPORT)):
        for name, text in files.items():
            project.write(name, text.replace("127.0.0.1:6379", urlsplit(redis_url).netloc))
        outputs.append(project.python(script))
    before, after = (json.loads(output.partition("\n")[0]) for output in outputs[:2])
    assert {name: statuses for name, (statuses, _wait) in after.items()} == {
        "anon": [200] * 3 + [429] * 3,
        "user": [201] * 5 + [429],
        "burst": [200] * 2 + [429] * 4,
        "users": [200] * 4 + [429] * 2,
    }
    for name, (statuses, wait) in before.items():
        assert statuses == after[name][0]
        assert wait == pytest.approx(after[name][1], abs=5)

    rules = json.loads(outputs[2][outputs[2].index('{\n  "plans"') :])["rules"]
    assert {entry["name"]: (entry["capacity"], entry["period"], entry.get("scope", "*")) for entry in rules} == {
        "anon": (3, 86_400, "*"),
        "user": (5, 86_400, "*"),
        "burst": (2, 60, "burst"),
        "users": (4, 3_600, "users"),
    }


def run(source: str) -> dict[str, Any]:
    """Run a block of the page, and return its names."""
    names: dict[str, Any] = {"__name__": "page", "HttpResponse": HttpResponse}
    exec(compile(source, "docs/moving.md", "exec"), names)
    return names


def ours(section: str) -> dict[str, Any]:
    """Load the rules of a section, run its block that uses this app, and return its names."""
    for text in blocks(section, "json"):
        as_code.load(as_code.parse(text.encode()), "default")
    (source,) = (source for source in blocks(section, "python") if source.startswith("# ratelimits\n"))
    return run(source)


def statuses(view: Any, count: int, query: str = "", method: str = "get", user: User | None = None) -> list[int]:
    answers = []
    for _ in range(count):
        request = getattr(RequestFactory(), method)(f"/?{query}")
        request.user = user or AnonymousUser()
        answers.append(view(request).status_code)
    return answers


@pytest.fixture
def _afresh(monkeypatch: pytest.MonkeyPatch, db: None) -> None:
    begin_afresh(monkeypatch)


@pytest.mark.usefixtures("_afresh")
class TestSnippets:
    def test_django_ratelimit(self) -> None:
        old = run(next(source for source in blocks("django-ratelimit", "python") if "import ratelimit\n" in source))
        assert old["login"](RequestFactory().post("/")).status_code == 200
        rule("login", "fixed_window", capacity=5, period=60, scope="login:POST", key_kind="ip")
        assert statuses(ours("django-ratelimit")["login"], 6, method="post") == [200] * 5 + [429]

    def test_the_cost_of_zero_exempts(self) -> None:
        rule("login", "fixed_window", capacity=1, period=60, scope="login", key_kind="ip")
        (decorator,) = re.findall(r"in the view: `@(limited\(.+?\))` \|", SECTIONS["django-ratelimit"])
        view = run(f"from ratelimits.decorators import limited\n@{decorator}\ndef view(request): return HttpResponse()")
        assert statuses(view["view"], 2) + statuses(view["view"], 2, "free=1") == [200, 429, 200, 200]

    def test_a_user_with_a_token_and_a_session_has_one_count(self) -> None:
        said = "a user with a token and a session has one count, as before"
        assert said in SECTIONS["Django REST framework's throttles"]
        session, token = Identity(user="user:1"), Identity(user="user:1", api_key="api_key:9")
        rule("burst", "sliding_log", capacity=1, period=60)
        assert [check(one).allowed for one in (session, token)] == [True, False]

    def test_a_rule_per_user_does_not_limit_requests_without_a_user(self) -> None:
        rule("user", "sliding_log", capacity=0, period=60, key_kind="user")
        assert check(Identity(address="ip:203.0.113.9")).allowed
        assert not check(Identity(user="user:1", address="ip:203.0.113.9")).allowed

    def test_django_smart_ratelimit(self) -> None:
        view = ours("django-smart-ratelimit")["search"]
        assert statuses(view, 21, user=User(pk=7)) == [200] * 20 + [429]

    def test_limits(self) -> None:
        send = ours("limits")["send"]
        assert [send("42") for _ in range(3)] + [send("43")] == [True, True, False, True]

    @pytest.mark.parametrize(
        "spelling", re.findall(r"\| `((?:SlidingLog|FixedWindow|SlidingWindow)\(.+?\))`", SECTIONS["limits"])
    )
    def test_the_algorithms_of_limits(self, spelling: str) -> None:
        names = run("from ratelimits.algorithms.limits import *\nfrom ratelimits.algorithms.typed_rates import rate")
        made = eval(spelling, {**names, "capacity": 5, "period": 60})
        assert made.capacity == 5

    def test_flask_limiter(self) -> None:
        view = ours("Flask-Limiter")["slow"]
        assert statuses(view, 1, "parts=2") + statuses(view, 2) + statuses(view, 1, "parts=0") == [429, 200, 429, 200]


def test_every_section_has_the_old_spelling_beside_the_new_one() -> None:
    for section, text in SECTIONS.items():
        assert len(text.split()) <= 900, section
        assert "ratelimits" in text
        assert re.search(r"^\| [^|]+ \| ratelimits", text, re.MULTILINE), section
