"""Do what docs/requests/who.md says, with the packages themselves.

test_who.py runs this file in a project of its own.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser, User
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client as DjangoClient
from django.test import RequestFactory
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from knox.auth import TokenAuthentication as KnoxAuthentication
from knox.models import AuthToken
from ninja import NinjaAPI
from ninja.security import HttpBearer
from rest_framework.authentication import BasicAuthentication, TokenAuthentication
from rest_framework.authtoken.models import Token
from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework_api_key.models import APIKey
from rest_framework_api_key.permissions import HasAPIKey
from rest_framework_simplejwt.authentication import JWTAuthentication, JWTStatelessUserAuthentication
from rest_framework_simplejwt.tokens import AccessToken

from ratelimits.decorators import limited
from ratelimits.identity import Identity, identify
from ratelimits.naming import digest
from ratelimits.ninja import limited as limited_operation
from ratelimits.outbound import WaitTooLong, permits
from ratelimits.testing import override_rules
from tests.identity.asking import BLOCKS, Who, ask, recipe, statuses
from tests.identity.shop.models import (
    Client,
    Device,
    OAuthAccessToken,
    OAuthApplication,
    Organizer,
    Team,
    TeamAPIToken,
)

pytestmark = [pytest.mark.django_db, pytest.mark.urls(__name__)]


class TeamTokenAuthentication(TokenAuthentication):
    """Authenticate as pretix does: by a team's token, by a device or by an access token."""

    def authenticate_credentials(self, key: str) -> Any:
        for token in OAuthAccessToken.objects.select_related("user", "application").filter(token=key):
            return token.user, token
        for model, field in ((TeamAPIToken, "token"), (Device, "api_token")):
            for row in model.objects.filter(**{field: key}):
                return AnonymousUser(), row
        return None


class ClaimsAuthentication(TokenAuthentication):
    """Authenticate as django-allauth does: `request.auth` is a dict with the claims of a JWT."""

    keyword = "Claims"

    def authenticate_credentials(self, key: str) -> Any:
        return User.objects.get(username=key), {"sub": key, "exp": 1}


class EventPermission(BasePermission):
    """Find the organizer in the path, as pretix does. A caller without this organizer has no access."""

    def has_permission(self, request: Request, view: Any) -> bool:
        slug = view.kwargs.get("organizer")
        if slug is None:
            return True
        auth: Any = request.auth
        request.organizer = Organizer.objects.get(slug=slug)  # type: ignore[attr-defined]
        if isinstance(auth, OAuthAccessToken):
            return auth.organizers.filter(slug=slug).exists()
        return bool((auth.team if isinstance(auth, TeamAPIToken) else auth).organizer.slug == slug)


class Event(Who):
    authentication_classes = [TeamTokenAuthentication]
    permission_classes = [EventPermission]

    def get(self, request: Request, organizer: str = "") -> Any:
        return super().get(request)


class BearerOfUser(HttpBearer):
    def authenticate(self, request: HttpRequest, token: str) -> Any:
        return User.objects.get(username=token)


class BearerOfText(HttpBearer):
    def authenticate(self, request: HttpRequest, token: str) -> Any:
        return token


class BearerOfClaims(HttpBearer):
    def authenticate(self, request: HttpRequest, token: str) -> Any:
        return {"sub": token, "exp": 1}


api = NinjaAPI(docs_url=None)


def who(request: HttpRequest) -> dict[str, Any]:
    return identify(request)._asdict()


for name, bearer in {"user": BearerOfUser(), "text": BearerOfText(), "claims": BearerOfClaims()}.items():
    api.get(f"/{name}", auth=bearer)(limited_operation()(who))

CLASSES: dict[str, list[type]] = {
    "drf": [BasicAuthentication, TokenAuthentication],
    "jwt": [JWTAuthentication],
    "stateless": [JWTStatelessUserAuthentication],
    "knox": [KnoxAuthentication],
    "wger": [TokenAuthentication, ClaimsAuthentication, JWTAuthentication],
}
urlpatterns = [
    *(path(f"{name}/", Who.as_view(authentication_classes=classes)) for name, classes in CLASSES.items()),
    path("key/", Who.as_view(permission_classes=[HasAPIKey])),
    path("open/", Who.as_view()),
    path("organizers/<organizer>/", Event.as_view()),
    path("me/", Event.as_view()),
    path("ninja/", api.urls),
]
ADDRESS = "ip:127.0.0.1"


@pytest.fixture
def ada() -> User:
    return User.objects.create_user("ada")


def of(user: User, api_key: str | None = None) -> Identity:
    """Return the identity of a user who is the account."""
    return Identity(f"user:{user.pk}", api_key, f"account:{user.pk}", address=ADDRESS)


def test_tokens_of_the_framework_need_nothing(ada: User) -> None:
    token = Token.objects.create(user=ada)
    asked = ask("/drf/", f"Token {token.key}")
    assert asked == of(ada, f"api_key:authtoken.token:{digest(token.key)}")
    assert statuses("/drf/", *[f"Token {token.key}"] * 3, kind="api_key") == [200, 200, 429]
    assert ask("/drf/") == Identity(address=ADDRESS)


@pytest.mark.parametrize("view", ["jwt", "stateless"])
def test_each_jwt_of_a_user_is_one_api_key(ada: User, view: str) -> None:
    tokens = [f"Bearer {AccessToken.for_user(ada)}" for _ in range(3)]
    assert len(set(tokens)) == 3
    assert ask(f"/{view}/", tokens[0]) == of(ada)._replace(unreadable=("api_key",))
    assert statuses(f"/{view}/", *tokens, kind="caller") == [200, 200, 429]
    for policy, expected in (("allow", 200), ("deny", 503)):
        with override_rules([{"name": "two", "rate": "2/hour", "key_kind": "api_key", "on_failure": policy}]):
            refused = DjangoClient(headers={"Authorization": tokens[0]}).get(f"/{view}/")
            assert refused.status_code == expected
    with recipe("djangorestframework-simplejwt"):
        key = str(ada.pk) if view == "jwt" else digest(str(ada.pk))
        assert ask(f"/{view}/", tokens[0]) == of(ada, f"api_key:{key}")
        assert statuses(f"/{view}/", *tokens, kind="api_key") == [200, 200, 429]
        assert ask(f"/{view}/").api_key is None


def test_each_login_of_knox_is_one_api_key(ada: User) -> None:
    tokens = [f"Token {AuthToken.objects.create(ada)[1]}" for _ in range(3)]
    first, second = ask("/knox/", tokens[0]), ask("/knox/", tokens[1])
    assert first.api_key is not None
    assert first.api_key.startswith("api_key:knox.authtoken:")
    assert first.api_key != second.api_key
    assert statuses("/knox/", *tokens, kind="api_key") == [200, 200, 200]
    with recipe("django-rest-knox"):
        assert ask("/knox/", tokens[0]) == of(ada, f"api_key:auth.user:{ada.pk}")
        assert statuses("/knox/", *tokens, kind="api_key") == [200, 200, 429]


def test_the_key_of_a_permission_is_an_api_key_and_its_account(django_assert_num_queries: Any) -> None:
    key, secret = APIKey.objects.create_key(name="phone")
    _other, others = APIKey.objects.create_key(name="tablet")
    expired = "Api-Key " + others[:-1]
    header = f"Api-Key {secret}"
    assert ask("/key/", header) == Identity(address=ADDRESS)
    assert statuses("/key/", *[header] * 3, kind="api_key") == [200, 200, 200]
    with recipe("djangorestframework-api-key") as callers:
        name = f"api_key:rest_framework_api_key.apikey:{digest(key.pk)}"
        asked = ask("/key/", header)
        assert (asked.user, asked.api_key, asked.account) == (None, name, f"account:{name}")
        assert statuses("/key/", *[header] * 2, f"Api-Key {others}", header, kind="api_key") == [200, 200, 200, 429]
        assert statuses("/key/", *["Api-Key wrong"] * 3, kind="api_key") == [403, 403, 403]
        for unknown in ("Api-Key wrong", expired, "Api-Key ", ""):
            assert ask("/open/", unknown).api_key is None
        request = RequestFactory().get("/", headers={"Authorization": header})
        with django_assert_num_queries(1):
            assert callers.key_of(request) == key


def test_what_the_authentication_of_ninja_returns_is_read(ada: User) -> None:
    assert ask("/ninja/text", "Bearer secret").api_key == f"api_key:{digest('secret')}"
    key = f"api_key:auth.user:{ada.pk}"
    asked = ask("/ninja/user", "Bearer ada")
    assert (asked.user, asked.api_key, asked.account) == (None, key, f"account:{key}")
    asked = ask("/ninja/claims", "Bearer ada")
    assert (asked.user, asked.api_key, asked.unreadable) == (None, None, ("api_key", "account"))
    with recipe("django-ninja"):
        assert ask("/ninja/user", "Bearer ada") == of(ada, key)
        assert ask("/ninja/text", "Bearer secret").api_key == f"api_key:{digest('secret')}"
        asked = ask("/ninja/claims", "Bearer ada")
        assert (asked.user, asked.api_key) == (None, f"api_key:{digest('ada')}")
        assert statuses("/ninja/user", *["Bearer ada"] * 3, kind="user") == [200, 200, 429]
        assert statuses("/ninja/claims", *["Bearer ada"] * 3, kind="api_key") == [200, 200, 429]


class TestPretix:
    @pytest.fixture(autouse=True)
    def _rows(self, ada: User) -> None:
        """Make two organizers. The token of a team and a device have the same number, and Ada works for both."""
        acme, other = (Organizer.objects.create(slug=slug) for slug in ("acme", "other"))
        team = Team.objects.create(organizer=acme)
        TeamAPIToken.objects.create(pk=3, team=team, token="team")
        Device.objects.create(pk=3, organizer=acme, api_token="device")
        app = OAuthApplication.objects.create(pk=7, name="scanner")
        for number in range(3):
            token = OAuthAccessToken.objects.create(application=app, user=ada, token=f"oauth{number}")
            token.organizers.set([acme, other])

    def test_without_settings_a_token_is_its_own_account(self) -> None:
        asked = ask("/organizers/acme/", "Token device")
        assert (asked.api_key, asked.account) == ("api_key:shop.device:3", "account:api_key:shop.device:3")
        tokens = [f"Token oauth{number}" for number in range(3)]
        assert statuses("/organizers/acme/", *tokens, kind="api_key") == [200, 200, 200]

    def test_the_organizer_pays_for_three_kinds_of_credentials(self, ada: User) -> None:
        with recipe("Several kinds of credentials: pretix"):
            acme = f"account:{Organizer.objects.get(slug='acme').pk}"
            keys = [f"api_key:shop.{key}" for key in ("teamapitoken:3", "device:3", "oauthapplication:7")]
            asked = [ask("/organizers/acme/", f"Token {token}") for token in ("team", "device", "oauth0")]
            assert [one.api_key for one in asked] == keys
            assert [one.user for one in asked] == [None, None, f"user:{ada.pk}"]
            assert {one.account for one in asked} == {acme}
            assert ask("/organizers/other/", "Token oauth0").account not in (acme, None)
            assert ask("/me/", "Token oauth0").account == f"account:user:{ada.pk}"
            assert ask("/me/", "Token team").account == "account:api_key:shop.teamapitoken:3"
            tokens = [f"Token oauth{number}" for number in range(3)]
            assert statuses("/organizers/acme/", *tokens, kind="api_key") == [200, 200, 429]
            assert statuses("/organizers/acme/", "Token team", "Token device", tokens[0], kind="account")[-1] == 429


def test_permanent_tokens_stay_beside_jwts(ada: User) -> None:
    token = Token.objects.create(user=ada)
    jwts = [f"Bearer {AccessToken.for_user(ada)}", "Claims ada"]
    assert [ask("/wger/", jwt).unreadable for jwt in jwts] == [("api_key",), ("api_key",)]
    with recipe("Permanent tokens and JWTs: wger"):
        assert ask("/wger/", f"Token {token.key}") == of(ada, f"api_key:authtoken.token:{digest(token.key)}")
        assert [ask("/wger/", jwt) for jwt in jwts] == [of(ada, f"api_key:{ada.pk}")] * 2
        assert ask("/wger/").api_key is None
        assert statuses("/wger/", f"Token {token.key}", *jwts, kind="caller") == [200, 200, 429]
        assert statuses("/wger/", *jwts, f"Token {token.key}", jwts[0], kind="api_key") == [200, 200, 200, 429]


def test_new_sessions_of_an_mcp_client_share_its_limit() -> None:
    names: dict[str, Any] = {
        "Client": Client,
        "HttpResponse": HttpResponse,
        "JsonResponse": JsonResponse,
        "csrf_exempt": csrf_exempt,
        "limited": limited,
    }
    exec(compile(BLOCKS["MCP servers"], "MCP servers", "exec"), names)
    for token in ("first", "second"):
        Client.objects.create(token=token)

    def call(token: str, session: str) -> int:
        headers = {"Authorization": f"Bearer {token}", "Mcp-Session-Id": session}
        response: HttpResponse = names["mcp"](RequestFactory().post("/mcp", headers=headers))
        return response.status_code

    with override_rules([{"name": "two", "rate": "2/hour", "key_kind": "caller", "scope": "mcp"}]):
        assert [call("first", session) for session in "abc"] == [200, 200, 429]
        assert call("second", "a") == 200
        assert [call("invented", session) for session in "abc"] == [401, 401, 401]


def test_tools_of_a_server_outside_of_django_take_permits() -> None:
    with override_rules([{"name": "two", "rate": "2/hour", "key_kind": "user", "scope": "mcp"}]):
        for _tool in range(2):
            with permits("mcp", identity=Identity(user="user:42"), max_wait=0):
                pass
        with pytest.raises(WaitTooLong), permits("mcp", identity=Identity(user="user:42"), max_wait=0):
            pass
        with permits("mcp", identity=Identity(user="user:43"), max_wait=0):
            pass


def test_users_and_keys_of_two_tenants_with_one_number_are_two() -> None:
    def request(tenant: str) -> HttpRequest:
        made: Any = RequestFactory().get("/")
        made.tenant, made.user, made.auth = SimpleNamespace(schema_name=tenant), User(pk=3), Device(pk=3)
        return made  # type: ignore[no-any-return]

    assert identify(request("acme")) == identify(request("other"))
    with recipe("Tenants that share the numbers of users"):
        acme, other = identify(request("acme")), identify(request("other"))
        assert (acme.user, acme.account, acme.api_key) == (
            "user:acme:3",
            "account:acme",
            f"api_key:{digest('acme:3')}",
        )
        assert {acme.user, acme.account, acme.api_key}.isdisjoint({other.user, other.account, other.api_key})
        anonymous: Any = request("acme")
        anonymous.user = AnonymousUser()
        del anonymous.auth
        assert identify(anonymous) == Identity(account="account:acme", address=ADDRESS)
