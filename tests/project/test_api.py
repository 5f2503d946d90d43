from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.test import Client
from django.utils import timezone

from project.models import ApiKey
from ratelimits.models import Account, Rule

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def issued() -> tuple[ApiKey, str]:
    Account.objects.create(identifier="acme")
    user = get_user_model().objects.create_user(username="acme")
    return ApiKey.objects.issue(name="web", user=user, account="acme")


@pytest.fixture
def api(issued: tuple[ApiKey, str]) -> Client:
    return Client(headers={"Authorization": f"Api-Key {issued[1]}"})


def test_the_time_in_a_zone(api: Client) -> None:
    response = api.get("/api/time/", {"zone": "Asia/Tokyo"})
    assert response.status_code == 200
    assert response.json()["time"].endswith("+09:00")


def test_an_unknown_zone_is_a_bad_request(api: Client) -> None:
    assert api.get("/api/time/", {"zone": "Mars/Olympus"}).status_code == 400


def test_a_text_costs_as_many_tokens_as_it_has_words(api: Client) -> None:
    Rule.objects.create(
        name="text", meter="tokens", key_kind="api_key", algorithm="token_bucket", capacity=10, rate=1, period=3600
    )
    response = api.post("/api/text/", {"text": "the quick fox, the fox"}, content_type="application/json")
    assert response.json() == {"tokens": 5, "frequent": {"the": 2, "fox": 2, "quick": 1}}
    assert response["RateLimit"].startswith('"text";r=5;')
    refused = api.post("/api/text/", {"text": "six words are more than five"}, content_type="application/json")
    assert refused.status_code == 429
    assert int(refused["Retry-After"]) > 0


def test_a_request_of_one_meter_is_not_limited_in_another(api: Client) -> None:
    Rule.objects.create(
        name="text", meter="tokens", key_kind="api_key", algorithm="token_bucket", capacity=1, rate=1, period=3600
    )
    assert [api.get("/api/time/").status_code for _ in range(3)] == [200] * 3


def test_a_stream_reserves_its_most_tokens_and_then_costs_what_was_sent(api: Client) -> None:
    Rule.objects.create(
        name="text", meter="tokens", key_kind="api_key", algorithm="token_bucket", capacity=10, rate=1, period=3600
    )

    def stream(**data: object) -> Any:
        return api.post("/api/stream/", data, content_type="application/json")

    response = stream(text="the quick fox", max_tokens=8)
    assert response["RateLimit"].startswith('"text";r=2;')
    assert b"".join(response.streaming_content) == b"the quick fox "
    # A client closes the connection after the first word.
    response = stream(text="the quick fox", max_tokens=7)
    content = iter(response.streaming_content)
    next(content)
    response.close()
    assert stream(text="the fox", max_tokens=7).status_code == 429
    assert stream(text="the fox", max_tokens=6).status_code == 200
    assert stream(max_tokens=6).status_code == 400


def test_only_the_digest_of_a_secret_is_kept(issued: tuple[ApiKey, str]) -> None:
    key, secret = issued
    assert secret not in str(ApiKey.objects.filter(pk=key.pk).values().get())


@pytest.mark.parametrize("header", ["Api-Key wrong", "Api-Key", "Api-Key ü"])
def test_an_unknown_key_is_refused(header: str) -> None:
    response = Client(headers={"Authorization": header}).get("/api/time/")
    assert response.status_code == 401
    assert response["WWW-Authenticate"] == "Api-Key"


def test_a_revoked_key_is_refused(api: Client, issued: tuple[ApiKey, str]) -> None:
    ApiKey.objects.filter(pk=issued[0].pk).update(revoked_at=timezone.now())
    assert api.get("/api/time/").status_code == 401


def test_without_a_key_there_is_no_answer() -> None:
    assert Client().get("/api/time/").status_code == 401


def test_the_home_page_says_the_rules_as_sentences(api: Client) -> None:
    Rule.objects.create(name="burst", key_kind="api_key", algorithm="token_bucket", capacity=10, rate=5, period=1)
    page = api.get("/").content.decode()
    assert "5 requests per second" in page
    assert "/admin/" in page


def test_the_schema_describes_the_api_and_its_key(api: Client) -> None:
    schema = api.get("/api/schema/", headers={"Accept": "application/json"}).json()
    assert {"/api/time/", "/api/text/"} <= schema["paths"].keys()
    assert "ApiKey" in schema["components"]["securitySchemes"]
