"""Test who a request is from and who pays, in projects that are not ours: what limits count, and what is billed."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any

import pytest
import redis
from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.contrib.auth.middleware import AuthenticationMiddleware
from django.contrib.auth.models import AnonymousUser, User
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.db import connections
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client
from django.urls import path
from django.utils.functional import SimpleLazyObject
from rest_framework.authentication import BaseAuthentication
from rest_framework.response import Response
from rest_framework.views import APIView

from project.models import ApiKey
from ratelimits.decorators import limited
from ratelimits.engine.call import shard
from ratelimits.engine.keys import ledger_name
from ratelimits.engine.server import current_server
from ratelimits.identity import Identity, NotAName, aidentify, identify, name_of
from ratelimits.models import Access
from ratelimits.models.keys import key_name
from ratelimits.outbound import WaitTooLong, permits
from ratelimits.quota import checking
from ratelimits.status.fact import Fact, Level
from ratelimits.status.facts import facts
from ratelimits.status.operating import reset
from ratelimits.throttling import QuotaThrottle
from ratelimits.usage.counting import process_totals
from tests.identity.conftest import Device, Team, request, token_user
from tests.support.below import SITE
from tests.support.entry_points import counted
from tests.support.rows import rule

pytestmark = pytest.mark.django_db(transaction=True)

#: The window of a test ends long after the test.
HOUR: dict[str, Any] = {"period": 3600, "window_start": "first_hit"}

Hooks = Callable[..., None]


def admitted(*requests: HttpRequest) -> list[bool]:
    return [checking.check(identify(one)).allowed for one in requests]


# Credentials and users of several models


def test_two_kinds_of_credentials_with_one_primary_key_are_two(hooks: Hooks, redis_client: redis.Redis) -> None:
    hooks()
    rule("each", "fixed_window", **HOUR, capacity=1, key_kind="api_key")
    team, device = request(auth=Team(pk=3)), request(auth=Device(pk=3))
    assert admitted(team, device, team, device) == [True, True, False, False]
    lines = {field.split(" ")[4] for field in counted(redis_client)}
    assert lines == {"api_key:tests.team:3", "api_key:tests.device:3"}


def test_users_of_another_model_have_their_model_in_their_name(hooks: Hooks) -> None:
    hooks()
    assert identify(request(User(pk=3))).user == "user:3"
    who = identify(request(Team(pk=3)))
    assert (who.user, who.account) == ("user:tests.team:3", "account:tests.team:3")


def test_a_proxy_of_the_user_model_and_a_user_without_a_row_are_the_user(hooks: Hooks) -> None:
    class ProxyOfUser(User):
        class Meta:
            app_label = "tests"
            proxy = True

    hooks()
    assert identify(request(ProxyOfUser(pk=3))).user == identify(request(token_user(3))).user == "user:3"
    assert identify(request(token_user("3"))).user == identify(request("3")).user == "user:3"


def test_rows_that_account_returns_have_their_model_unless_it_is_the_one_of_accounts(hooks: Hooks) -> None:
    hooks(ACCOUNT=lambda request: request.auth)
    assert identify(request(auth=Team(pk=3))).account == "account:tests.team:3"
    hooks(ACCOUNT=lambda request: ApiKey(pk=3) if request.auth else User(pk=3), ACCOUNT_MODEL="project.ApiKey")
    assert identify(request(auth=Team(pk=3))).account == "account:3"
    assert identify(request()).account == "account:user:3"
    hooks(ACCOUNT=lambda request: User(pk=3), ACCOUNT_MODEL="auth.User")
    assert identify(request()).account == "account:3"


@pytest.mark.parametrize("names", [("user:7", "api_key:7", "tests.team:7", "~" + "0" * 32, "=7")])
def test_no_text_is_a_name_of_another_kind(hooks: Hooks, names: tuple[str, ...]) -> None:
    hooks(ACCOUNT=lambda request: request.headers.get("X-Account"))
    for name in names:
        assert identify(request(**{"X-Account": name})).account == f"account:={name}"
        assert identify(request(name)).user == f"user:={name}"


# Who is counted, and who pays


def test_a_user_who_mints_tokens_has_one_limit_per_caller(hooks: Hooks) -> None:
    hooks()
    rule("hourly", "fixed_window", **HOUR, capacity=3)  # per caller is the default
    tokens = [request(User(pk=1), Device(pk=number)) for number in range(6)]
    assert admitted(*tokens) == [True] * 3 + [False] * 3


def test_a_caller_is_the_user_or_else_the_api_key_or_else_the_address(hooks: Hooks) -> None:
    hooks()
    rule("hourly", "fixed_window", **HOUR, capacity=1, key_kind="caller")
    user, key, nobody = request(User(pk=1), Device(pk=1)), request(AnonymousUser(), Device(pk=1)), request()
    assert admitted(user, key, nobody) == [True] * 3
    assert admitted(request(User(pk=1)), request(None, Device(pk=1), "203.0.113.9"), request()) == [False] * 3
    assert admitted(request(address="203.0.113.9")) == [True]


def test_an_api_key_without_a_user_is_an_account_that_no_user_and_no_text_can_be(
    hooks: Hooks, redis_client: redis.Redis
) -> None:
    hooks()
    rule("hourly", "fixed_window", **HOUR)
    assert admitted(request(AnonymousUser(), Device(pk=3)), request("api_key:tests.device:3"), request()) == [True] * 3
    assert {field.split(" ")[3]: field.split(" ")[4] for field in counted(redis_client)} == {
        "api_key:tests.device:3": "api_key:tests.device:3",
        "%3Dapi_key:tests.device:3": "user:%3Dapi_key:tests.device:3",
        "-": "anonymous",
    }


def test_without_an_answer_of_account_the_user_pays_and_else_the_api_key(hooks: Hooks) -> None:
    hooks(ACCOUNT=lambda request: None)
    assert identify(request(User(pk=42), Device(pk=3))).account == "account:user:42"
    assert identify(request(None, Device(pk=3))).account == "account:api_key:tests.device:3"
    assert identify(request()).account is None


@pytest.mark.parametrize("shards", [1, 4, 64])
@pytest.mark.parametrize("kind", ["user", "caller", "api_key"])
def test_a_key_has_one_count_whatever_account_says_and_however_many_shards_there_are(
    hooks: Hooks, shards: int, kind: str
) -> None:
    hooks(ACCOUNT=lambda request: request.headers["X-Org"], SHARDS=shards)
    rule("hourly", "fixed_window", **HOUR, capacity=2, key_kind=kind)
    asked = [request(User(pk=1), Device(pk=1), **{"X-Org": f"org{number}"}) for number in range(10)]
    assert sum(admitted(*asked)) == 2


def test_a_user_who_is_the_account_and_a_promise_of_one_account_need_one_shard(hooks: Hooks) -> None:
    def heads() -> int:
        answer = checking.check(identify(request(User(pk=1), Device(pk=1))))
        assert answer.decision is not None
        call = answer.decision.call
        keyspace = current_server().keyspace
        return len(
            {shard(keyspace, key, call.account, call.in_account) for key in (*call.keys, f"account:{call.account}")}
        )

    rule("hourly", "fixed_window", **HOUR, key_kind="user")
    hooks(SHARDS=64)
    assert heads() == 1
    hooks(SHARDS=64, ACCOUNT=lambda request: "acme")
    assert heads() == 2
    hooks(SHARDS=64, ACCOUNT=lambda request: "acme", ONE_ACCOUNT_PER_KEY=True)
    assert heads() == 1


# Hooks


async def awaited(request: HttpRequest) -> str | None:
    await asyncio.sleep(0)
    return request.headers.get("X-Name")


class AsyncCall:
    """A hook that is an object whose call is async."""

    async def __call__(self, request: HttpRequest) -> str | None:
        return await awaited(request)


@pytest.mark.parametrize(
    "hook", [awaited, AsyncCall(), lambda request: awaited(request)], ids=["def", "object", "lambda"]
)
@pytest.mark.parametrize("name", ["USER", "API_KEY", "ACCOUNT"])
def test_an_async_hook_is_awaited_by_sync_and_async_code(hooks: Hooks, name: str, hook: Any) -> None:
    hooks(**{name: hook})
    asked = request(**{"X-Name": "ada"})
    who = identify(asked)
    assert who == asyncio.run(aidentify(asked))
    found = {"USER": who.user, "API_KEY": who.api_key, "ACCOUNT": who.account}[name]
    assert found == ("api_key:" + str(name_of("ada", secret=True)) if name == "API_KEY" else f"{name.lower()}:ada")


def test_none_asks_the_next_source(hooks: Hooks) -> None:
    hooks(USER=lambda request: None, API_KEY=lambda request: None, ACCOUNT=lambda request: "")
    who = identify(request(User(pk=1), Device(pk=2)))
    assert (who.user, who.api_key, who.account) == ("user:1", "api_key:tests.device:2", "account:user:1")


def test_a_hook_says_that_a_request_has_no_user_or_no_api_key(hooks: Hooks) -> None:
    hooks(USER=lambda request: AnonymousUser(), API_KEY=lambda request: "")
    assert identify(request(User(pk=1), {"sub": 1})) == Identity(address="ip:198.51.100.7")


def generator(request: HttpRequest) -> Iterator[str]:
    yield "acme"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (True, "type bool"),
        (1.5, "type float"),
        ({"sub": 1}, "type dict"),
        (["acme"], "type list"),
        (object(), "type object"),
        (b"\xff", "not UTF-8"),
        (Team(), "tests.Team that is not saved"),
    ],
)
@pytest.mark.parametrize("name", ["USER", "API_KEY", "ACCOUNT"])
@pytest.mark.parametrize("ask", [identify, lambda request: asyncio.run(aidentify(request))], ids=["sync", "async"])
def test_any_other_answer_of_a_hook_is_an_error_that_names_setting_view_and_type(
    hooks: Hooks, name: str, answer: Any, said: str, ask: Callable[..., Identity]
) -> None:
    if name == "API_KEY" and isinstance(answer, bytes):
        answer = memoryview(answer)  # bytes are a secret, which need not be a text
        said = "type memoryview"
    hooks(**{name: lambda request: answer})
    with pytest.raises(
        ImproperlyConfigured, match=rf"RATELIMITS\['{name}'\] returned .*{said} for {SITE}/\. It must return"
    ):
        ask(request())


def test_a_generator_is_no_hook(hooks: Hooks) -> None:
    hooks(ACCOUNT=generator)
    with pytest.raises(ImproperlyConfigured, match="ACCOUNT"):
        identify(request())
    assert inspect.isgeneratorfunction(generator)


# Lazy objects, subclasses, and users that the project has set


def test_a_lazy_row_text_or_none_is_read_as_what_it_is(hooks: Hooks) -> None:
    user = User.objects.create(username="ada")

    def loaded() -> User:
        try:
            return User.objects.get(pk=user.pk)
        finally:
            connections.close_all()  # also that of the thread in which async code loads it

    for lazy, account in (
        (loaded, f"account:user:{user.pk}"),
        (lambda: "acme", "account:acme"),
        (lambda: None, None),
    ):
        hooks(ACCOUNT=lambda request, lazy=lazy: SimpleLazyObject(lazy))
        assert identify(request()).account == asyncio.run(aidentify(request())).account == account


def test_a_member_of_an_enum_is_its_text(hooks: Hooks) -> None:
    class Org(StrEnum):
        ACME = "acme"

    hooks(ACCOUNT=lambda request: Org.ACME)
    assert identify(request()).account == "account:acme"
    hooks()
    assert identify(request(Org.ACME)).user == identify(request("acme")).user == "user:acme"


async def test_async_code_keeps_the_user_that_the_project_has_set(hooks: Hooks) -> None:
    async def auser() -> Any:
        return AnonymousUser()

    hooks()
    asked: Any = request(User(pk=7))
    asked.auser = auser
    assert (await aidentify(asked)).user == "user:7"
    assert asked.user.pk == 7
    asked.user = SimpleLazyObject(lambda: User(pk=8))
    assert (await aidentify(asked)).user == identify(asked).user == "user:8"
    asked.user = None
    assert (await aidentify(asked)).user is identify(asked).user is asked.user is None


async def test_async_code_loads_the_user_that_django_has_not_loaded_yet(hooks: Hooks) -> None:
    async def auser() -> Any:
        return User(pk=9)

    hooks()
    asked: Any = request()
    asked.session = {}
    AuthenticationMiddleware(lambda request: HttpResponse()).process_request(asked)
    asked.auser = auser
    assert (await aidentify(asked)).user == "user:9"


def lazy_user(get_response: Callable[..., Any]) -> Any:
    """Do what the middleware of many projects with JWTs does: set a user that is loaded when somebody reads it."""

    def middleware(request: Any) -> Any:
        request.user = SimpleLazyObject(lambda: User.objects.get(username=request.headers["X-Name"]))
        return get_response(request)

    async def amiddleware(request: Any) -> Any:
        request.user = SimpleLazyObject(lambda: User.objects.get(username=request.headers["X-Name"]))
        return await get_response(request)

    return markcoroutinefunction(amiddleware) if iscoroutinefunction(get_response) else middleware


lazy_user.sync_capable = lazy_user.async_capable = True  # type: ignore[attr-defined]


async def _name_of_user(request: Any) -> HttpResponse:
    return HttpResponse(await sync_to_async(lambda: request.user.username)())


@pytest.mark.parametrize("entry", ["decorated", "plain"])
def test_a_lazy_user_of_the_project_is_counted_and_stays_the_user_of_the_view(
    hooks: Hooks, settings: Any, entry: str
) -> None:
    hooks(PATHS=["/plain/"])
    settings.ROOT_URLCONF = __name__
    before = ["django.contrib.sessions.middleware.SessionMiddleware"]
    before += ["django.contrib.auth.middleware.AuthenticationMiddleware", f"{__name__}.lazy_user"]
    settings.MIDDLEWARE = [*before, "ratelimits.middleware.QuotaMiddleware"]
    rule("hourly", "fixed_window", **HOUR, capacity=1, key_kind="user")
    for name in ("ada", "bea"):
        User.objects.create(username=name)

    async def asked(name: str) -> tuple[int, bytes]:
        response = await AsyncClient().get(f"/{entry}/", headers={"X-Name": name})
        return response.status_code, response.content

    assert asyncio.run(asked("ada")) == (200, b"ada")
    assert asyncio.run(asked("bea")) == (200, b"bea")
    assert [asyncio.run(asked(name))[0] for name in ("ada", "bea")] == [429, 429]


@pytest.mark.parametrize("length", [251, 252, 300])
def test_a_user_with_a_long_name_is_its_account_and_can_be_reset(hooks: Hooks, length: int) -> None:
    hooks()
    rule("hourly", "fixed_window", **HOUR, capacity=1, key_kind="user")
    asked = request(token_user("x" * length))
    assert admitted(asked, asked) == [True, False]
    reset(str(identify(asked).user), "hourly", "a test")
    assert admitted(asked) == [True]


def test_calls_to_others_share_the_count_of_a_users_requests(hooks: Hooks) -> None:
    hooks()
    rule("mail", "fixed_window", **HOUR, capacity=1, key_kind="user", scope="mail")
    with permits("mail", 1, identity=Identity(user="user:43"), max_wait=0):
        pass
    assert not checking.check(identify(request(User(pk=43))), "mail").allowed
    hooks(ONE_ACCOUNT_PER_KEY=True, ACCOUNT=lambda request: "acme")
    with pytest.raises(ImproperlyConfigured, match="ONE_ACCOUNT_PER_KEY"):
        permits("mail", 1, identity=Identity(user="user:43"), max_wait=0)


@pytest.mark.parametrize("who", [{"user": "user:43"}, {"api_key": "api_key:43"}])
def test_without_account_a_call_to_others_can_name_no_other_account(hooks: Hooks, who: dict[str, Any]) -> None:
    hooks(SHARDS=64)
    own = permits("mail", identity=Identity(**who))._outbound.identity
    assert permits("mail", identity=own)._outbound.identity == own
    with pytest.raises(ImproperlyConfigured, match="leave the account out"):
        permits("mail", identity=Identity(**who, account="account:acme"))


def test_calls_to_others_are_counted_by_a_view_key_as_people_write_it(hooks: Hooks) -> None:
    hooks()
    rule("mail", "fixed_window", **HOUR, capacity=2, key_kind="view_key", scope="mail", view_key="header:X-Tenant")
    for text in ("header:X-Tenant=acme", key_name("header:x-tenant= acme")):
        with permits("mail", identity=Identity(view_keys=(text,)), max_wait=0):
            pass
    with (
        pytest.raises(WaitTooLong),
        permits("mail", identity=Identity(view_keys=("header:X-Tenant=acme",)), max_wait=0),
    ):
        pass
    for wrong in (("X-Tenant=acme",), "header:X-Tenant=acme"):
        with pytest.raises(ImproperlyConfigured, match="is not the key of a view"):
            permits("mail", identity=Identity(view_keys=wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        *(("203.0.113.9", "ip:203.0.113.9"), ("ip:2001:db8::1", "ip:2001:db8::/64"), ("ip:x", "ip:203.0.113.9")),
        *(("ip:::ffff:203.0.113.8", "ip:203.0.113.8"), ("ip:203.0.113.0/24", "ip:203.0.113.9")),
    ],
)
def test_calls_to_others_name_an_address_as_requests_do(written: str, wanted: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=wanted):
        permits("mail", identity=Identity(address=written))
    for address in ("ip:203.0.113.9", "ip:2001:db8::/64", "ip:unknown", "outbound"):
        permits("mail", identity=Identity(address=address))


@pytest.mark.parametrize("text", ["abc:" + "x" * 300, "t:\0evil"])
def test_no_text_is_the_digest_of_another_one_with_a_kind(hooks: Hooks, text: str) -> None:
    hooks(ACCOUNT=lambda request: request.text)

    def account(name: str) -> str:
        asked: Any = request()
        asked.text = name
        return str(identify(asked).account)

    assert account(text) != account(account(text).removeprefix("account:"))


@pytest.mark.parametrize("text", ["Shop.customer:42", "größe.customer:4", "tests.team:1"])
def test_a_label_of_a_model_is_escaped_in_any_spelling(text: str) -> None:
    assert name_of(text) == f"={text}"


# What cannot be read


UNREADABLE_USERS = [{"id": 1}, 1.5, object(), True, User(), token_user(None)]


@pytest.mark.parametrize("user", UNREADABLE_USERS, ids=lambda user: type(user).__name__)
@pytest.mark.parametrize("policy", ["deny", "allow"])
def test_rules_that_need_a_user_that_cannot_be_read_follow_their_failure_policy(
    hooks: Hooks, user: Any, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    hooks()
    rule("user", "fixed_window", **HOUR, capacity=1, key_kind="user", on_failure=policy)
    for _ in range(3):
        answer = checking.check(identify(request(user)))
        assert (answer.allowed, answer.unavailable) == (policy == "allow", policy == "deny")


def test_a_block_of_a_user_does_not_apply_while_the_user_cannot_be_read(hooks: Hooks) -> None:
    hooks()
    rule("address", "fixed_window", **HOUR, capacity=9, key_kind="ip")
    for target in ("user:42", "account:42"):
        Access.objects.create(target=target, reason="abuse")
    assert admitted(request(User(pk=42)), request({"id": 42})) == [False, True]
    hooks(USER=lambda request: request.user["id"] if isinstance(request.user, dict) else None)
    assert admitted(request({"id": 42})) == [False]
    Access.objects.create(target="198.51.100.7", reason="abuse")
    hooks()
    assert admitted(request({"id": 42})) == [False]


@pytest.mark.parametrize("user", UNREADABLE_USERS, ids=lambda user: type(user).__name__)
def test_rules_that_do_not_need_it_decide_as_usual(hooks: Hooks, user: Any) -> None:
    hooks()
    rule("address", "fixed_window", **HOUR, capacity=2, key_kind="ip")
    assert admitted(*[request(user)] * 3) == [True, True, False]


@pytest.mark.parametrize("auth", [{"sub": "42"}, True, object()], ids=["claims", "bool", "object"])
def test_claims_are_no_api_key_and_hold_up_only_rules_per_api_key(hooks: Hooks, auth: Any) -> None:
    hooks()
    rule("caller", "fixed_window", **HOUR, capacity=2, key_kind="caller")
    assert admitted(*[request(User(pk=1), auth)] * 3) == [True, True, False]
    rule("api-key", "fixed_window", **HOUR, key_kind="api_key", on_failure="deny")
    assert admitted(request(User(pk=2), auth)) == [False]


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"key_kind": "caller"}, False),
        ({"key_kind": "account"}, False),
        ({"key_kind": "ip", "callers": "anonymous"}, False),
        ({"key_kind": "ip", "callers": "authenticated"}, False),
        ({"key_kind": "api_key"}, True),
        ({"key_kind": "global"}, True),
        ({"key_kind": "user", "mode": "shadow"}, True),
    ],
)
def test_a_rule_needs_the_user_for_its_count_or_for_its_callers(
    hooks: Hooks, fields: dict[str, Any], allowed: bool
) -> None:
    hooks()
    rule("one", "fixed_window", **HOUR, on_failure="deny", **fields)
    assert admitted(request({"id": 1})) == [allowed]


def test_status_counts_requests_that_cannot_be_read_and_names_the_hook(hooks: Hooks, settings: Any) -> None:
    hooks()
    assert found()["identities"].level is Level.GREEN
    admitted(request({"id": 1}), request({"id": 2}), request(User(pk=1), {"sub": 1}))
    process_totals.write()
    fact = found()["identities"]
    assert (fact.level, fact.word) == (Level.AMBER, "3 requests in 24 hours with one that cannot be read")
    assert "RATELIMITS['API_KEY'] and RATELIMITS['USER']" in fact.detail


def found() -> dict[str, Fact]:
    return {fact.name: fact for fact in facts()}


def test_the_log_names_the_hook_once(hooks: Hooks, caplog: pytest.LogCaptureFixture) -> None:
    hooks()
    for number in range(3):
        identify(request({"id": number, "path": "once"}))
    said = [message for message in caplog.messages if "RATELIMITS['USER']" in message]
    assert len(said) <= 1


# Names that look like digests


def test_no_name_that_a_client_chooses_equals_the_digest_of_another(hooks: Hooks) -> None:
    hooks(ACCOUNT=lambda request: request.headers.get("X-Account"))
    victim = "v" * 300
    digest = ledger_name(f"user:{victim}")
    assert digest.startswith("user:~")
    rule("user", "fixed_window", **HOUR, capacity=1, key_kind="user")
    attacker = digest.removeprefix("user:")
    assert admitted(request(attacker), request(victim)) == [True, True]
    accounts = [identify(request(**{"X-Account": name})).account for name in (victim, ledger_name(victim))]
    assert len(set(accounts)) == 2


@pytest.mark.parametrize("names", [("x" * 300, "x" * 301), ("a\0", "a\ufffd"), ("\ud800", "\udfff")])
def test_names_that_are_too_long_or_cannot_be_stored_share_nothing(hooks: Hooks, names: tuple[str, str]) -> None:
    hooks()
    one, other = (identify(request(name)) for name in names)
    assert one.user != other.user
    assert one.account != other.account


# The entry points of the project


class ByHeader(BaseAuthentication):
    """Authenticate as the JSON in a header says."""

    def authenticate(self, request: Any) -> tuple[Any, Any] | None:
        user, auth = json.loads(request.headers["X-Who"])
        return ({"id": 1} if user == "unreadable" else user), auth


class Guarded(APIView):
    authentication_classes = [ByHeader]
    permission_classes: list[Any] = []
    throttle_classes = [QuotaThrottle]

    def get(self, request: Any) -> Response:
        return Response({})


def _with_user(request: HttpRequest) -> HttpRequest:
    found: Any = request
    found.user, found.auth = json.loads(request.headers["X-Who"])
    found.user = {"id": 1} if found.user == "unreadable" else found.user
    return request


def decorated(request: HttpRequest) -> HttpResponse:
    return limited()(lambda request: HttpResponse())(_with_user(request))


urlpatterns = [
    path("throttle/", Guarded.as_view()),
    path("decorator/", decorated),
    path("decorated/", limited()(_name_of_user)),
    path("plain/", _name_of_user),
]


@pytest.mark.urls(__name__)
@pytest.mark.parametrize("address", ["/throttle/", "/decorator/"])
def test_a_user_that_cannot_be_read_is_no_error_of_the_server(hooks: Hooks, address: str) -> None:
    hooks()
    rule("user", "fixed_window", **HOUR, capacity=1, key_kind="user", on_failure="allow")
    client = Client()
    asked = [client.get(address, headers={"X-Who": json.dumps([who, None])}) for who in ("unreadable", "ada", "ada")]
    assert [answer.status_code for answer in asked] == [200, 200, 429]


def test_checks_call_no_hook(hooks: Hooks) -> None:
    def never(request: HttpRequest) -> str:
        raise AssertionError("called by a check")

    hooks(USER=never, API_KEY=never, ACCOUNT=never)
    call_command("check")


def test_a_name_needs_a_value_that_is_one() -> None:
    assert [name_of(value) for value in (None, "", b"", 0, "a", b"a", ApiKey(pk=7))] == [
        *[None] * 3,
        "0",
        "a",
        "a",
        "project.apikey:7",
    ]
    coroutine = awaited(request())
    with pytest.raises(NotAName, match="a value of the type coroutine"):
        name_of(coroutine)
    coroutine.close()
