"""What the floors above add to the pages of this one.

Each floor makes one `Additions` for each place from which Django starts it: its `ready`, and its pages in the admin.
Without them, a page shows only what this floor knows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from django.db.models import Model
from django.http import HttpRequest, HttpResponse
from django.utils.safestring import SafeString

from ratelimits.algorithms.limits import Algorithm
from ratelimits.identity import Identity
from ratelimits.models import Rule
from ratelimits.simulate.trial import TrialResult
from ratelimits.status.fact import Fact
from ratelimits.status.redis_state import RedisState


@dataclass(frozen=True, slots=True)
class UsedKeys:
    """A table that has the keys and accounts with usage in the last days.

    table        this table
    shown_with   the table whose rows a user must be allowed to view, to find these keys
    keys         returns the keys that contain a text, and the accounts that contain it, as keys
    accounts     returns the accounts that contain a text
    keys_of      returns keys that an account has used, at most this number
    accounts_of  returns accounts that have used a key, at most this number; "" stands for no account
    """

    table: type[Model]
    shown_with: type[Model]
    keys: Callable[[str], Iterable[str]]
    accounts: Callable[[str], Iterable[str]]
    keys_of: Callable[[str, int], Iterable[str]]
    accounts_of: Callable[[str, int], Iterable[str]]


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """A task that a worker runs again and again, for a fact of the status page.

    name      its name in `TaskRun`
    setting   the setting with the seconds between two runs
    note      a sentence about what does not count as a run
    """

    name: str
    title: Any
    setting: str
    note: Any = ""


@dataclass(frozen=True, slots=True)
class InspectedKey:
    """The key that a page of the inspector is about.

    site         the admin site
    key          the key as people write it
    now          the present moment, in s since 1970 UTC
    at           the moment for which the user asks, in the same unit; None for no moment
    account_url  the inspector's page about the account of the key; "" if there is no other page
    url_of       returns the inspector's page about another key of an account, for the same moment
    """

    request: HttpRequest
    site: Any
    identity: Identity
    key: str
    now: float
    at: int | None
    account_url: str
    url_of: Callable[[str, str], str]


@dataclass(frozen=True, slots=True)
class Panel:
    """A part of the inspector's page. `leads` says whether it comes before the rules."""

    html: SafeString
    leads: bool = False


@dataclass(frozen=True, slots=True)
class RuleEffect:
    """What a rule would do to the keys in use: in sentences, and whether it would refuse every request."""

    text: str
    refuses_everyone: bool


@dataclass(frozen=True, slots=True)
class RulePage:
    """A further page below the list of rules.

    name    the end of its URL's name
    path    its path below the path of the list
    view    answers a request, for the admin page of rules and the parameters of the path
    button  the text of the button on the form of a rule that opens the page with the typed rule; "" for no button
    task    the text of the link on the index; "" for no link
    """

    name: str
    path: str
    view: Callable[..., HttpResponse]
    button: Any = ""
    task: Any = ""


def nothing(*_arguments: Any) -> tuple[Any, ...]:
    """Add nothing."""
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Additions:
    """What one floor adds. A function that the floor does not give adds nothing.

    used_keys  where keys with usage are found
    facts      returns facts of the status page, for a database, the present moment (s since 1970 UTC), and whether a
               rule bills
    redis_facts  returns facts about what Redis has, for its state, and whether a rule bills
    undecided  returns how many requests failure policies have decided since a moment (s since 1970 UTC), according to
               a database
    tasks      the tasks of the floor that a worker runs
    status     returns panels of the status page: HTML, for a request and an admin site
    index      returns panels of the admin's index, for a request and the name of an admin site
    inspector  returns panels of the inspector's page
    columns    returns columns of a list whose rows belong to keys, for its admin page and a request
    last_refusals  returns, by rule, when it last refused the key of an identity (the start of the bin, in s since 1970
                   UTC), and how many requests in 24 hours
    effect      returns what a rule with this algorithm would do to the keys in use. None if no used keys are known
    trials      returns what a rule, which may be unsaved, would have admitted
    rule_pages  further pages about rules
    requests_of    returns, by target, how many requests a block refused or an allow exempted: of these targets (of all,
                   if they are None), in this number of seconds. None if this is not known
    """

    used_keys: tuple[UsedKeys, ...] = ()
    facts: Callable[[str, float, bool], Iterable[Fact]] = nothing
    redis_facts: Callable[[RedisState, bool], Iterable[Fact]] = nothing
    undecided: Callable[[str, int], int] | None = None
    tasks: tuple[WorkerTask, ...] = ()
    status: Callable[[HttpRequest, Any], Iterable[SafeString]] = nothing
    index: Callable[[HttpRequest, str], Iterable[SafeString]] = nothing
    inspector: Callable[[InspectedKey], Iterable[Panel]] = nothing
    columns: Callable[[Any, HttpRequest], Iterable[Any]] = nothing
    last_refusals: Callable[[Identity, str], Iterable[tuple[int, tuple[int, int]]]] = nothing
    effect: Callable[[Rule, Algorithm], RuleEffect] | None = None
    trials: Callable[[Rule], Iterable[TrialResult]] = nothing
    rule_pages: tuple[RulePage, ...] = ()
    requests_of: Callable[[Collection[str] | None, int], Mapping[str, int]] | None = None


#: What the floors above have added, the lower floor first.
registered: list[Additions] = []


def register(added: Additions) -> None:
    """Let the pages have what a floor adds. Call this when Django starts."""
    if added not in registered:
        registered.append(added)


def used_keys() -> list[UsedKeys]:
    """Return the tables that have used keys."""
    return [one for added in registered for one in added.used_keys]


def requests_of() -> Callable[[Collection[str] | None, int], Mapping[str, int]] | None:
    """Return the function that counts the requests of blocks and allows; None if nothing counts them."""
    return next((added.requests_of for added in registered if added.requests_of is not None), None)


def rule_pages() -> list[RulePage]:
    """Return the further pages about rules."""
    return [page for added in registered for page in added.rule_pages]
