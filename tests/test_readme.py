"""Do what README.md tells people to do, word for word."""

from __future__ import annotations

import csv
import io
import re
import shlex
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
from django.core.management import call_command

from project.demo import processes
from tests.support.eventually import until

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


#: The files that Django REST framework's quickstart adds to a new project.
QUICKSTART = {
    "settings.py": """
INSTALLED_APPS += ["rest_framework"]
REST_FRAMEWORK = {"DEFAULT_PAGINATION_CLASS": "rest_framework.pagination.PageNumberPagination", "PAGE_SIZE": 10}
""",
    "quickstart/views.py": """
from django.contrib.auth.models import User
from rest_framework import permissions, serializers, viewsets


class UserSerializer(serializers.HyperlinkedModelSerializer):
    class Meta:
        model = User
        fields = ["url", "username"]


class UserViewSet(viewsets.ModelViewSet):
    queryset = User.objects.order_by("username")
    serializer_class = UserSerializer
    permission_classes = [permissions.IsAuthenticated]
""",
    "urls.py": """
from django.urls import include
from rest_framework import routers
from shop.quickstart.views import UserViewSet

router = routers.DefaultRouter()
router.register("users", UserViewSet)
urlpatterns += [path("", include(router.urls)), path("api-auth/", include("rest_framework.urls"))]
""",
}

#: A script that adds a rule by the admin's form, and prints the session of the user.
ADD_RULE = """
import sys
from django.contrib.auth.models import User
from django.test import Client

user, _ = User.objects.get_or_create(username="ada", defaults={"is_staff": True, "is_superuser": True})
client = Client(SERVER_NAME="127.0.0.1")
client.force_login(user)
form = {"scope": "*", "key_kind": "user", "mode": "enforce", "algorithm": "token_bucket", "on_failure": ""}
answer = client.post("/admin/ratelimits/rule/add/", {**form, **RULE})
assert answer.status_code == 302, answer.content.decode()
print(client.session.session_key)
"""
CHECK_AND_MIGRATE = """
from django.core.management import call_command

call_command("check")
call_command("migrate", verbosity=0)
"""
BURST = {"name": "burst", "meter": "requests", "capacity": 10, "rate": 5, "period": 1}
WORDS = {"name": "words", "scope": "search", "meter": "tokens", "capacity": 4, "rate": 1, "period": 3600}


def manage(*arguments: str) -> str:
    """Return the output of a command of the project in the current folder."""
    done = subprocess.run([sys.executable, "manage.py", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def add_rule(values: dict[str, Any], before: str = "") -> list[str]:
    """Run `before` and then add a rule, in one process; return the printed lines, the last of which is the session."""
    said = manage("shell", "--verbosity", "0", "--command", f"{before}\nRULE = {values!r}\n{ADD_RULE}")
    return said.splitlines()


@pytest.fixture
def shop(tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a new project with Django REST framework's quickstart and the README's snippets; enter its folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DJANGO_SETTINGS_MODULE")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # as if it were installed
    call_command("startproject", "shop", ".")
    (tmp_path / "shop" / "quickstart").mkdir()
    call_command("startapp", "quickstart", "shop/quickstart")
    for name, text in QUICKSTART.items():
        add(tmp_path / "shop" / name, text)
    server = urlsplit(redis_url).netloc
    for block in blocks("python"):
        name, _comma, variant = block.partition("\n")[0].removeprefix("# ").partition(", ")
        if not variant:
            add(tmp_path / name, block.replace("127.0.0.1:6379", server))
    return tmp_path


def add(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


class Client:
    """A user with a session at the project's web server, and how often each status was answered."""

    def __init__(self, port: int, session: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.headers = {"Cookie": f"sessionid={session}"}
        self.statuses: Counter[int] = Counter()

    def get(self, path: str) -> Any:
        """Return the headers of the response."""
        try:
            with urlopen(Request(self.url + path, headers=self.headers), timeout=60) as answer:
                status, headers = answer.status, answer.headers
        except HTTPError as error:
            status, headers = error.code, error.headers
        self.statuses[status] += 1
        return headers


def test_the_five_steps_limit_meter_and_bill_a_new_project(shop: Path, fsync_at_once: None) -> None:
    # The test does not wait as long for the ledger as people do.
    add(shop / "shop" / "settings.py", '\nRATELIMITS |= {"SEAL_INTERVAL": 1, "DRAIN_INTERVAL": 1}\n')
    *said, session = add_rule(BURST, CHECK_AND_MIGRATE)
    assert "no issues" in "".join(said)
    with ExitStack() as stack:
        for command in blocks("sh")[-1].splitlines():
            arguments = shlex.split(command.partition("#")[0])
            stack.enter_context(processes.running(arguments, shop / f"{arguments[3]}.log"))
        listener = stack.enter_context(processes.listening_socket(0))
        web = ["gunicorn", "shop.wsgi", "--bind", f"fd://{listener.fileno()}", "--threads", "2", "--no-control-socket"]
        stack.enter_context(processes.running(web, shop / "web.log", pass_fds=(listener.fileno(),)))
        client = Client(listener.getsockname()[1], session)

        headers = client.get("/search/")
        refused, shown = blocks("http")
        for field in ("RateLimit-Policy", "RateLimit"):
            assert f"{field}: {headers[field]}\n" in shown
        client.get("/users/")

        add_rule(WORDS)
        client.get("/search/?q=three+words+long")
        assert client.statuses == {200: 3}
        headers = client.get("/search/?q=two+more")
        assert client.statuses == {200: 3, 429: 1}
        assert '"words";r=1' in headers["RateLimit"]

        while client.statuses[429] == 1:
            headers = client.get("/users/")
        for field in ("Retry-After", "RateLimit-Policy", "RateLimit"):
            assert f"{field}: {headers[field]}\n" in refused

        report = re.search(r"`python manage.py (ratelimits_report .*?)`", README)
        assert report is not None
        printed = [time.strftime("%Y-%m", time.gmtime()) if part == "2026-11" else part for part in report[1].split()]

        def in_the_ledger() -> bool:
            """Return whether the worker has written everything.

            Read the file, because a report would take another process.
            """
            with closing(sqlite3.connect(shop / "db.sqlite3")) as database:
                (found,) = database.execute(
                    "SELECT sum(admitted_units), sum(CASE meter WHEN 'requests' THEN denied_requests END)"
                    " FROM ratelimits_line"
                )
            return bool(found == (client.statuses[200] + 3, client.statuses[429]))

        def billed() -> bool:
            """Return whether the report has what the client saw, and the words that it asked for."""
            used, denied = Counter[str](), Counter[str]()
            for line in csv.DictReader(io.StringIO(manage(*printed))):
                used[line["meter"]] += int(line["consumed_quantity"])
                denied[line["meter"]] += int(line["denied_count"])
            return (
                used == {"requests": client.statuses[200], "tokens": 3} and denied["requests"] == client.statuses[429]
            )

        until(in_the_ledger, "the usage in the ledger", patience=120)
        until(billed, "the usage on the report", patience=120)


def test_with_the_embedded_server_fewer_settings_are_enough(shop: Path) -> None:
    own, embedded = (block for block in blocks("python") if block.startswith("# shop/settings.py"))
    assert embedded.startswith("# shop/settings.py, with the embedded server\n")
    settings = shop / "shop" / "settings.py"
    settings.write_text(settings.read_text().partition(own.splitlines()[0] + "\n")[0] + embedded)
    assert "no issues" in manage("check")
    assert "CACHE_ALIAS" not in settings.read_text()


def test_each_of_the_two_set_up_commands_stands_alone() -> None:
    demo, tests, _celery = blocks("sh")
    for command in (demo, tests):
        assert command.count("\n") == 1
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install -r requirements.txt && ")
    assert demo.endswith(".venv/bin/python manage.py demo\n")
    assert tests.endswith(".venv/bin/python -m pytest -n auto\n")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_to_a_file_and_to_a_heading_of_it() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    targets = [
        (page, path, anchor)
        for page in pages
        for path, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text())
    ]
    assert targets
    lost = [
        f"{page.name}: {path}#{anchor}"
        for page, path, anchor in targets
        for target in [page.parent / path if path else page]
        if not target.exists() or (anchor and anchor not in anchors(target))
    ]
    assert lost == []
