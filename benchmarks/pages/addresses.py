"""The pages that are measured, and the longest time that each may take."""

from __future__ import annotations

from typing import NamedTuple

_ADMIN = "/admin/ratelimits"


class Page(NamedTuple):
    """A page of the admin.

    name   its name in the tables
    url    its path and query
    bound  the promise: the page takes at most this number of milliseconds
    asks   whether the page asks Redis, so that it is also measured while Redis does not answer
    """

    name: str
    url: str
    bound: int
    asks: bool = False


#: By name of the table in docs/performance.md: the pages of this table.
TABLES: dict[str, tuple[Page, ...]] = {
    "pages": (
        Page("status, 24 hours", f"{_ADMIN}/status/", 500, True),
        Page("status, 30 days", f"{_ADMIN}/status/?window=month", 500, True),
        Page("shadow refusals", f"{_ADMIN}/shadow/", 500),
        Page("the admin's index", "/admin/", 500, True),
    ),
    "inspector": (
        Page("an API key", f"{_ADMIN}/inspect/?q=api_key:7", 200, True),
        Page("an API key that is refused", f"{_ADMIN}/inspect/?q=api_key:8&account=acct-2", 200, True),
        Page("an account", f"{_ADMIN}/inspect/?q=account:acct-2", 200, True),
        Page("an address", f"{_ADMIN}/inspect/?q=203.0.113.9", 200, True),
        Page("search: part of many keys", f"{_ADMIN}/inspect/?q=pi_key:1", 200),
        Page("search: an account's name", f"{_ADMIN}/inspect/?q=Customer%2012%20Ltd", 200),
        Page("search: part of a user's name", f"{_ADMIN}/inspect/?q=erson99", 200),
        Page("search: nothing found", f"{_ADMIN}/inspect/?q=nobody-has-this", 200),
        Page("suggestions while a name is typed", f"{_ADMIN}/inspect/keys/?q=omer%2012", 200),
    ),
    "lists": (
        Page("rules", f"{_ADMIN}/rule/", 500),
        Page("overrides", f"{_ADMIN}/keyoverride/", 500),
        Page("overrides, a search", f"{_ADMIN}/keyoverride/?q=api_key:99", 500),
        Page("accounts", f"{_ADMIN}/account/", 500),
        Page("accounts, a search", f"{_ADMIN}/account/?q=omer%2012", 500),
        Page("ledger lines", f"{_ADMIN}/line/", 500),
        Page("ledger lines of an account", f"{_ADMIN}/line/?q=acct-2", 500),
        Page("ledger lines of a key", f"{_ADMIN}/line/?q=api_key:8", 500),
        Page("batches", f"{_ADMIN}/batch/", 500),
        Page("usage by period", f"{_ADMIN}/periodusage/", 500),
        Page("usage by period, a search", f"{_ADMIN}/periodusage/?q=acct-2", 500),
        Page("gaps", f"{_ADMIN}/durabilitygap/", 500),
        Page("open periods", f"{_ADMIN}/report/open/", 500),
        Page("all changes", f"{_ADMIN}/change/", 500),
    ),
}
#: All these pages.
PAGES = tuple(page for pages in TABLES.values() for page in pages)
