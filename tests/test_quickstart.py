"""Do what docs/quickstart.md tells people to do, word for word and in its order."""

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
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from html import unescape
from pathlib import Path
from runpy import run_path
from urllib.parse import urlsplit

import httpx
import pytest
from django.core.management import call_command

from project.demo import processes
from ratelimits.embedded import free_port
from tests.support import forked
from tests.support.eventually import until
from tests.support.forked import Forked
from tests.support.forms import Form

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "quickstart.md").read_text()
ADD_RULE = "/admin/ratelimits/rule/add/"
USER = {"username": "ada", "password": "a long pass phrase"}

#: The files that Django REST framework's quickstart adds to a new project.
DRF_QUICKSTART = {
    "settings.py": """
INSTALLED_APPS += ["rest_framework"]
REST_FRAMEWORK = {"DEFAULT_PAGINATION_CLASS": "rest_framework.pagination.PageNumberPagination", "PAGE_SIZE": 10}
""",
    "quickstart/__init__.py": "",
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


def step(number: int) -> str:
    """Return the text of a step of the page."""
    return PAGE.partition(f"\n## {number}. ")[2].partition("\n## ")[0]


def blocks(number: int, language: str) -> list[str]:
    """Return the code blocks of a step."""
    return re.findall(rf"^```{language}\n(.*?)^```", step(number), re.MULTILINE | re.DOTALL)


def commands(number: int) -> list[list[str]]:
    """Return the commands of a step, as lists of arguments."""
    return [shlex.split(line) for block in blocks(number, "sh") for line in block.splitlines()]


class Site:
    """The site that `runserver` serves, a person in the admin, and a client without a user.

    statuses  how often each status was answered to a request of the API
    """

    def __init__(self, url: str, log: Path, process: subprocess.Popen[bytes], clients: ExitStack) -> None:
        self._url, self._log, self._process = url, log, process
        self.statuses: Counter[int] = Counter()
        self.person = clients.enter_context(httpx.Client(base_url=url, timeout=60))
        self._curl = clients.enter_context(httpx.Client(timeout=60))

    def wait_until_started(self, times: int) -> None:
        """Wait until `runserver` has started the site for the n-th time. It starts the site again after an edit."""
        started = "Starting development server"
        until(lambda: self._log.read_text().count(started) >= times, "the site", patience=120)
        processes.wait_until_up(f"{self._url}/", self._process, self._log)

    def curl(self, command: list[str]) -> httpx.Response:
        """Send the request of a command `curl -i URL`."""
        program, option, url = command
        assert (program, option) == ("curl", "-i")
        return self._noted(self._curl.get(url.replace("http://127.0.0.1:8000", self._url)))

    def browse(self, path: str) -> httpx.Response:
        """Let the person open a page of the API in a browser."""
        return self._noted(self.person.get(path, headers={"Accept": "text/html"}))

    def _noted(self, answer: httpx.Response) -> httpx.Response:
        self.statuses[answer.status_code] += 1
        return answer

    def log_in(self) -> None:
        self._submit("/admin/login/?next=/admin/", USER)

    def add_rule(self, starting_point: str, **typed: str) -> None:
        """Choose a starting point in the form of a new rule, type values into some fields, and save."""
        links = re.findall(r'<a[^>]*href="(\?[^"]*)"[^>]*>([^<]*)</a>', self.person.get(ADD_RULE).text)
        (found,) = [unescape(link) for link, text in links if unescape(text) == starting_point]
        self._submit(ADD_RULE + found, typed)

    def edit_rule(self, name: str, **typed: str) -> None:
        """Open the rule from the list, type values into some fields, and save."""
        rules = self.person.get("/admin/ratelimits/rule/", params={"q": name}).text
        (found,) = set(re.findall(r'href="(/admin/ratelimits/rule/\d+/change/)', rules))
        self._submit(found, typed)

    def _submit(self, path: str, typed: dict[str, str]) -> None:
        form = Form(self.person.get(path).text).values
        assert form.keys() >= typed.keys()
        answer = self.person.post(path, data={**form, **typed})
        assert answer.status_code == 302, answer.text


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the new project of the page, and enter its folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DJANGO_SETTINGS_MODULE")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # as if it were installed
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    monkeypatch.setenv("RATELIMITS_EMBEDDED_LINGER", "0.1")
    for name, value in {**USER, "email": "ada@example.com"}.items():
        monkeypatch.setenv(f"DJANGO_SUPERUSER_{name.upper()}", value)
    ((program, command, *arguments),) = commands(1)
    assert program == "django-admin"
    call_command(command, *arguments)
    return tmp_path


def settings_for(server: str, redis_url: str) -> str:
    """Return the settings of the page, for the session's server or for the embedded server."""
    (settings,) = blocks(2, "python")
    if server == "own":
        return settings.replace("127.0.0.1:6379", urlsplit(redis_url).netloc)
    left_out = re.search(r"\*\*With the embedded server\*\*, leave out ([^.]*)\.", step(2))
    assert left_out is not None
    for name in re.findall(r"`(.+?)`", left_out[1]):
        setting = rf"^{name} = (?:\{{\n.*?^\}}|[^\n]*)\n" if name.isidentifier() else rf'{name}: "\w+", '
        settings, times = re.subn(setting, "", settings, flags=re.MULTILINE | re.DOTALL)
        assert times == 1, name
    assert "redis" not in settings
    return settings


def write(folder: Path, block: str) -> None:
    """Write a file whose name is in the block's first line. In the settings, replace only what the block assigns."""
    path = folder / block.partition("\n")[0].removeprefix("# ")
    if path.name == "settings.py":
        kept = path.read_text()
        for name in re.findall(r"^(\w+) = ", block, re.MULTILINE):
            kept = re.sub(rf"^{name} = \[\n.*?^\]\n", "", kept, flags=re.MULTILINE | re.DOTALL)
        block = f"{kept}\n{block}"
    path.write_text(block)


def add(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def run(arguments: list[str]) -> str:
    """Return the output of a command `python …` in the current folder."""
    assert arguments[0] == "python"
    done = forked.run([sys.executable, *arguments[1:]], capture_output=True, text=True)
    output: str = done.stdout
    assert done.returncode == 0, output + done.stderr
    return output


@contextmanager
def started(folder: Path) -> Iterator[Site]:
    """Run the commands of the third step, and log in to the admin."""
    migrate, create_user, (python, *server), _curl = commands(3)
    assert (python, server) == ("python", ["manage.py", "runserver"])
    assert "no issues" in run(["python", "manage.py", "check"])
    run(migrate)
    assert "no issues" in run(["python", "manage.py", "check", "--database", "default"])
    run([*create_user, "--noinput"])  # the environment has the answers
    port, log = free_port(), folder / "site.log"
    with (
        processes.running(["manage", "runserver", str(port)], log, popen=Forked) as process,
        ExitStack() as clients,
    ):
        site = Site(f"http://127.0.0.1:{port}", log, process, clients)
        site.wait_until_started(1)
        site.log_in()
        yield site


def shows(block: str, answer: httpx.Response) -> bool:
    """Return whether a response is the one of the page, or came some seconds later."""
    status, *fields = block.splitlines()
    assert status == f"{answer.http_version} {answer.status_code} {answer.reason_phrase}"
    for field in fields:
        name, _, value = field.partition(": ")
        pattern = re.sub(r"(?<=t=)\d+$|^\d+$", r"(\\d+)", value)
        found = re.fullmatch(pattern, answer.headers[name])
        assert found is not None, answer.headers
        for seconds, most in zip(found.groups(), re.findall(r"(?<=t=)\d+$|^\d+$", value), strict=True):
            assert 0 < int(seconds) <= int(most)
    return True


def typed(number: int, what: str) -> dict[str, str]:
    """Return what the page says to type into a form, after some words: by the names of the fields."""
    sentence = re.sub(r"\s+", " ", step(number)).partition(what)[2].partition(". ")[0]
    return {field: value for value, field in re.findall(r"`([^`]+)` as the (\w+)", sentence)}


@pytest.mark.parametrize("server", ["own", "embedded"])
def test_the_steps_limit_meter_and_bill_a_new_project(
    server: str, shop: Path, redis_url: str, fsync_at_once: None
) -> None:
    write(shop, settings_for(server, redis_url))
    # The test does not wait as long for the ledger as people do.
    add(shop / "shop" / "settings.py", '\nRATELIMITS |= {"SEAL_INTERVAL": 1, "DRAIN_INTERVAL": 1}\n')
    for block in blocks(3, "python"):
        write(shop, block)
    curl = commands(3)[-1]
    with started(shop) as site, ExitStack() as stack:
        answer = site.curl(curl)
        assert answer.text == '{"found":[]}'
        assert not any(name.startswith("ratelimit") for name in answer.headers)
        assert "HTTP 200 OK" in site.browse("/search/").text

        admitted, refused = blocks(4, "http")
        site.add_rule("5 per second, bursts to 10", **typed(4, "*5 per second, bursts to 10*. Then "))
        assert shows(admitted, site.curl(curl))
        site.curl(curl)
        site.curl(curl)
        assert shows(refused, site.curl(curl))
        site.edit_rule("burst", **typed(4, "Now open the rule again, "))
        until(lambda: site.curl(curl).status_code == 200, "a request after the edit", patience=15, pause=0.2)

        write(shop, *blocks(5, "python"))
        site.wait_until_started(2)
        site.add_rule("1,000 tokens a minute", **typed(5, "*1,000 tokens a minute*: "))
        three, two = commands(5)
        assert site.curl(three).status_code == 200
        answer = site.curl(two)
        assert answer.status_code == 429
        assert '"tokens";r=1' in answer.headers["RateLimit"]

        for block in blocks(6, "python"):
            write(shop, block)
        site.wait_until_started(3)
        *celery, report = commands(6)
        for arguments in celery:
            stack.enter_context(processes.running(arguments, shop / f"{arguments[3]}.log", popen=Forked))
        report = [time.strftime("%Y-%m", time.gmtime()) if part == "2026-11" else part for part in report]

        def in_the_ledger() -> bool:
            """Return whether the worker has written everything.

            Read the file, because a report would take another process.
            """
            with closing(sqlite3.connect(shop / "db.sqlite3")) as database:
                (found,) = database.execute(
                    "SELECT sum(admitted_units), sum(CASE meter WHEN 'requests' THEN denied_requests END)"
                    " FROM ratelimits_usage_line"
                )
            return bool(found == (site.statuses[200] + 3, site.statuses[429]))

        def billed() -> bool:
            """Return whether the report has what the clients saw, and the words that they asked for."""
            used, denied = Counter[str](), Counter[str]()
            for line in csv.DictReader(io.StringIO(run(report))):
                used[line["meter"]] += int(line["consumed_quantity"])
                denied[line["meter"]] += int(line["denied_count"])
            return used == {"requests": site.statuses[200], "tokens": 3} and denied["requests"] == site.statuses[429]

        until(in_the_ledger, "the usage in the ledger", patience=120, pause=0.2)
        until(billed, "the usage on the report", patience=120)


def test_the_settings_are_those_of_a_new_project_and_what_the_app_needs(shop: Path) -> None:
    before = run_path("shop/settings.py")
    write(shop, *blocks(2, "python"))
    after = run_path("shop/settings.py")
    added = {name: [one for one in after[name] if one not in before[name]] for name in ("INSTALLED_APPS", "MIDDLEWARE")}
    assert added == {
        "INSTALLED_APPS": ["rest_framework", "simple_history", "ratelimits", "ratelimits.usage", "ratelimits.billing"],
        "MIDDLEWARE": [
            "ratelimits.middleware.QuotaMiddleware",
            "simple_history.middleware.HistoryRequestMiddleware",
        ],
    }
    for name, names in added.items():
        assert [one for one in after[name] if one not in names] == before[name]
    assert {name for name in before if name.isupper()} <= after.keys()


def test_a_project_that_has_an_api_adds_only_what_is_missing(shop: Path, redis_url: str) -> None:
    for name, text in DRF_QUICKSTART.items():
        add(shop / "shop" / name, text)
    add(shop / "page.py", settings_for("own", redis_url))
    page = run_path("page.py")
    add(
        shop / "shop" / "settings.py",
        f"""
INSTALLED_APPS += ["simple_history", "ratelimits", "ratelimits.usage", "ratelimits.billing"]
MIDDLEWARE += {page["MIDDLEWARE"][-2:]!r}
CACHES = {page["CACHES"]!r}
REST_FRAMEWORK |= {page["REST_FRAMEWORK"]!r}
RATELIMITS = {page["RATELIMITS"]!r}
""",
    )
    with started(shop) as site:
        site.add_rule("5 per second, bursts to 10", key_kind="user", **typed(4, "*5 per second, bursts to 10*. Then "))
        answer = site.person.get("/users/")
        assert answer.json()["count"] == 1
        assert answer.headers["RateLimit"] == '"burst";r=2;t=20'
        for _request in range(3):
            answer = site.browse("/users/")
        assert answer.status_code == 429
        assert "HTTP 429 Too Many Requests" in answer.text
