"""The pages that are measured, and the longest time that each page may take."""

from __future__ import annotations

from typing import NamedTuple

_ADMIN = "/admin/ratelimits"


class Page(NamedTuple):
    """A page of the admin.

    name  its name in the tables
    url   its path and query
    asks  whether the page asks Redis. If it does, the page is also measured while Redis does not answer
    """

    name: str
    url: str
    asks: bool = False


class Table(NamedTuple):
    """A table of docs/performance.md.

    about  one or two words that name the pages
    bound  the promise: the median of each page is at most this number of milliseconds
    """

    about: str
    bound: int
    pages: tuple[Page, ...]


#: The tables by name.
TABLES: dict[str, Table] = {
    "pages": Table(
        "status",
        500,
        (
            Page("status, 24 hours", f"{_ADMIN}/status/", True),
            Page("status, 30 days", f"{_ADMIN}/status/?window=month", True),
            Page("shadow refusals", "/admin/ratelimits_usage/shadow/"),
            Page("the admin's index", "/admin/", True),
        ),
    ),
    "inspector": Table(
        "inspector",
        200,
        (
            Page("an API key", f"{_ADMIN}/inspect/?q=api_key:7", True),
            Page("an API key that is refused", f"{_ADMIN}/inspect/?q=api_key:8&account=acct-2", True),
            Page("an account", f"{_ADMIN}/inspect/?q=account:acct-2", True),
            Page("an address", f"{_ADMIN}/inspect/?q=203.0.113.9", True),
            Page("search: part of many keys", f"{_ADMIN}/inspect/?q=pi_key:1"),
            Page("search: an account's name", f"{_ADMIN}/inspect/?q=Customer%2012%20Ltd"),
            Page("search: part of a user's name", f"{_ADMIN}/inspect/?q=erson99"),
            Page("search: nothing found", f"{_ADMIN}/inspect/?q=nobody-has-this"),
            Page("suggestions while a name is typed", f"{_ADMIN}/inspect/keys/?q=omer%2012"),
        ),
    ),
    "lists": Table(
        "lists",
        500,
        (
            Page("rules", f"{_ADMIN}/rule/"),
            Page("overrides", f"{_ADMIN}/keyoverride/"),
            Page("overrides, a search", f"{_ADMIN}/keyoverride/?q=api_key:99"),
            Page("accounts", f"{_ADMIN}/account/"),
            Page("accounts, a search", f"{_ADMIN}/account/?q=omer%2012"),
            Page("ledger lines", "/admin/ratelimits_usage/line/"),
            Page("ledger lines of an account", "/admin/ratelimits_usage/line/?q=acct-2"),
            Page("ledger lines of a key", "/admin/ratelimits_usage/line/?q=api_key:8"),
            Page("batches", "/admin/ratelimits_usage/batch/"),
            Page("usage by period", "/admin/ratelimits_usage/periodusage/"),
            Page("usage by period, a search", "/admin/ratelimits_usage/periodusage/?q=acct-2"),
            Page("gaps", "/admin/ratelimits_usage/durabilitygap/"),
            Page("open periods", "/admin/ratelimits_billing/report/open/"),
            Page("all changes", f"{_ADMIN}/change/"),
        ),
    ),
}
#: The pages of all tables.
PAGES = tuple(page for table in TABLES.values() for page in table.pages)
