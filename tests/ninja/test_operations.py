"""Test the decorator for django-ninja with real operations, sync and async."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client
from django.urls import path
from ninja import Form, NinjaAPI, Schema
from ninja.security import APIKeyHeader

from ratelimits.ninja import limited
from ratelimits.quota.costs import WrongCost
from ratelimits.quota.receipts import settle
from ratelimits.unknown_names import named_by_views
from tests.support.below import SITE
from tests.support.entry_points import begin_afresh, counted
from tests.support.raw import RawRedis
from tests.support.rows import rule

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls("tests.ninja.test_operations")]


class Note(Schema):
    text: str


class Header(APIKeyHeader):
    param_name = "X-Key"

    def authenticate(self, request: HttpRequest, key: str | None) -> str | None:
        return key if key != "wrong" else None


api = NinjaAPI(urls_namespace="limited", docs_url=None)


@api.post("/notes", response=Note)
@limited("notes")
def notes(request: HttpRequest, note: Note) -> dict[str, str]:
    return {"text": note.text}


@api.post("/by-text", response=Note)
@limited("by-text", key=lambda request: json.loads(request.body)["text"])
def by_text(request: HttpRequest, note: Note) -> dict[str, str]:
    return {"text": note.text}


@api.post("/anotes", response=Note)
@limited("notes")
async def anotes(request: HttpRequest, note: Note) -> dict[str, str]:
    return {"text": note.text}


@api.get("/mine", auth=Header())
@limited("mine")
def mine(request: HttpRequest, response: HttpResponse) -> str:
    response["X-Own"] = "1"
    return "mine"


@api.get("/plain/{number}")
@limited("plain", cost=lambda request: {"tokens": 5}, key="arg:number")
def plain(request: HttpRequest, number: int, **other: Any) -> HttpResponse:
    settle(request, {"tokens": 2})
    return HttpResponse("plain")


@api.get("/aplain/{number}")
@limited("plain", cost={"tokens": 5}, key="arg:number")
async def aplain(request: HttpRequest, number: int) -> HttpResponse:
    return HttpResponse("plain")


@api.get("/chosen")
@limited("chosen", cost="query:tokens", cost_bounds={"requests": (1, 9)})
def chosen(request: HttpRequest) -> str:
    return "chosen"


@api.get("/achosen")
@limited("chosen", cost="query:tokens", cost_bounds={"requests": (1, 9)})
async def achosen(request: HttpRequest) -> str:
    return "chosen"


@api.get("/broken")
@limited("notes")
def broken(request: HttpRequest) -> str:
    raise RuntimeError


@api.get("/free")
def free(request: HttpRequest) -> str:
    return "free"


whole = NinjaAPI(urls_namespace="whole", docs_url=None)


@whole.get("/sync")
def of_whole(request: HttpRequest) -> str:
    return "sync"


@whole.get("/async")
async def aof_whole(request: HttpRequest, response: HttpResponse) -> str:
    return "async"


if hasattr(whole, "add_decorator"):  # since django-ninja 1.5
    whole.add_decorator(limited("whole"))

urlpatterns = [path("api/", api.urls), path("whole/", whole.urls)]


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_afresh(monkeypatch)


@pytest.mark.parametrize("name", ["notes", "anotes"])
@pytest.mark.parametrize("server", ["wsgi", "asgi"])
def test_an_operation_is_limited_with_its_headers(name: str, server: str) -> None:
    rule("burst", "fixed_window", scope="notes", capacity=2, period=3600)

    def post() -> Any:
        options: dict[str, Any] = {"data": {"text": "hello"}, "content_type": "application/json"}
        if server == "wsgi":
            return Client().post(f"/api/{name}", **options)
        return asyncio.run(AsyncClient().post(f"/api/{name}", **options))

    first, _second, third = post(), post(), post()
    assert (first.status_code, first.json()) == (200, {"text": "hello"})
    assert first["RateLimit"].startswith('"burst";r=1;t=')
    assert first["RateLimit-Policy"] == '"burst";q=2;w=3600'
    assert third.status_code == 429
    assert third["Content-Type"] == "application/problem+json"
    assert third.json()["violated-policies"] == ["burst"]
    assert int(third["Retry-After"]) > 0


if hasattr(whole, "add_decorator"):

    @pytest.mark.parametrize("name", ["sync", "async"])
    def test_all_operations_of_an_api_can_have_the_decorator(name: str) -> None:
        rule("burst", "fixed_window", scope="whole", capacity=1, period=3600)
        admitted, refused = Client().get(f"/whole/{name}"), Client().get(f"/whole/{name}")
        assert (admitted.status_code, admitted.json()) == (200, name)
        assert admitted["RateLimit"].startswith('"burst";r=0;t=')
        assert (refused.status_code, refused["Content-Type"]) == (429, "application/problem+json")


def test_only_a_request_that_is_authenticated_and_valid_is_charged(redis_client: RawRedis) -> None:
    rule("burst", "fixed_window", scope="*", capacity=2, period=3600, key_kind="api_key")
    client = Client()
    assert client.get("/api/mine", headers={"X-Key": "wrong"}).status_code == 401
    assert client.post("/api/notes", {}, content_type="application/json").status_code == 422
    assert counted(redis_client) == {}
    answers = [client.get("/api/mine", headers={"X-Key": key}) for key in ("a", "a", "a", "b")]
    assert [answer.status_code for answer in answers] == [200, 200, 429, 200]
    assert answers[0]["X-Own"] == "1"
    assert "RateLimit" in answers[0]


def test_a_cost_a_key_and_a_true_cost_work_as_for_other_views(redis_client: RawRedis) -> None:
    rule("tokens", "fixed_window", scope="plain", meter="tokens", capacity=10, period=3600, key_kind="view_key")
    answers = [Client().get(f"/api/plain/{number}") for number in (1, 1, 1, 1, 2)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 200]
    assert "RateLimit" in answers[0]
    assert asyncio.run(AsyncClient().get("/api/aplain/2"))["RateLimit"].startswith('"tokens";r=3;t=')
    assert "number" not in api.get_openapi_schema()["paths"][f"{SITE}/api/notes"]["post"].get("parameters", [])


def test_a_meter_that_is_not_known_is_an_error_that_names_the_operation(settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "METERS": ["pages"]}
    with pytest.raises(WrongCost, match=r"^tests\.ninja\.test_operations\.plain: the meter 'tokens' is not known"):
        Client().get("/api/plain/1")


@pytest.mark.parametrize("name", ["chosen", "achosen"])
def test_a_cost_that_the_client_chooses_is_within_bounds_or_400(name: str) -> None:
    answers = [Client().get(f"/api/{name}", {"tokens": tokens}) for tokens in ("lots", "10", "9")]
    assert [answer.status_code for answer in answers] == [400, 400, 200]
    assert answers[0]["Content-Type"] == "application/problem+json"
    assert answers[0].json()["detail"] == "The cost in requests must be a whole number from 1 to 9."


def test_a_server_error_is_refunded() -> None:
    rule("burst", "fixed_window", scope="notes", capacity=1, period=3600)
    client = Client(raise_request_exception=False)
    assert client.get("/api/broken").status_code == 500
    assert client.post("/api/notes", {"text": "hello"}, content_type="application/json").status_code == 200


def test_the_argument_for_headers_is_not_in_the_schema() -> None:
    paths = api.get_openapi_schema()["paths"]
    assert not paths[f"{SITE}/api/notes"]["post"].get("parameters")
    assert [one["name"] for one in paths[f"{SITE}/api/plain/{{number}}"]["get"]["parameters"]] == ["number"]


def test_an_operation_without_the_decorator_is_not_limited() -> None:
    rule("nothing", "fixed_window", capacity=0, period=60)
    assert Client().get("/api/free").status_code == 200


def test_the_scopes_of_operations_are_known(settings: Any) -> None:
    settings.ROOT_URLCONF = "tests.ninja.test_operations"
    of_whole_api = {"whole"} if hasattr(NinjaAPI, "add_decorator") else set()
    assert named_by_views().scopes == frozenset({"*", "notes", "by-text", "mine", "plain", "chosen"}) | of_whole_api


def test_the_snippet_of_the_page_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "requests" / "ninja.md").read_text()
    (snippet,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": __name__}
    exec(snippet, names)
    assert names["search"].ratelimits == ("search", {"requests": 1, "tokens": 5}, None)
    assert "/api/search" in names["api"].get_openapi_schema(path_prefix="/api/")["paths"]


def _of_json(request: HttpRequest, note: Note) -> str:
    return note.text


def _of_form(request: HttpRequest, note: Form[Note]) -> str:
    return note.text


def _of_field(request: HttpRequest, text: str = Form(...)) -> str:  # type: ignore[type-arg]
    return text


@pytest.mark.parametrize(
    "options", [{"key": "field:text"}, {"key": ["header:X", "field:text|lower"]}, {"cost": {"tokens": "field:text"}}]
)
def test_a_field_of_a_form_is_refused_if_the_operation_reads_json(options: dict[str, Any]) -> None:
    """A client could send one text that is JSON for the operation and a form, with another value, for the limit."""
    bounds = {"tokens": (1, 9)}
    for operation in (_of_form, _of_field):
        limited("notes", cost_bounds=bounds, **options)(operation)
    with pytest.raises(ImproperlyConfigured, match=r"_of_json: 'field:text.*so it reads its body as JSON"):
        limited("notes", cost_bounds=bounds, **options)(_of_json)


def test_a_function_reads_the_body_that_the_operation_reads() -> None:
    rule("each", "fixed_window", scope="by-text", capacity=1, period=3600, key_kind="view_key")
    smuggled = [json.dumps({"x": f"&text={number}&", "text": "one"}) for number in range(2)]
    for body, status in ((smuggled[0], 200), (smuggled[1], 429), ('{"text": "two"}', 200)):
        answer = Client().post("/api/by-text", body, content_type="application/x-www-form-urlencoded")
        assert answer.status_code == status
