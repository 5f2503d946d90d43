"""Fixtures of the tests in a real browser: Chromium, a page for each user, and requests to the demo's API."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from django.conf import settings
from django.contrib.auth.models import Permission, User
from django.test import Client

from project.models import ApiKey
from ratelimits import rules
from ratelimits.models import Account
from ratelimits.usage.counting import access

if TYPE_CHECKING:
    # Only `.ci/requirements.txt` has it, and pytest also imports the tests that it deselects.
    from playwright.sync_api import Browser, Page

#: Chromium asks nobody on the network but the test's own server.
_OPTIONS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)
#: Milliseconds that a page may take on a busy machine.
_PATIENCE = 60_000

OpenPage = Callable[..., "Page"]


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    """Start Debian's Chromium, in the build that shows no window: it takes two thirds of the processor time.

    Playwright keeps an event loop in this thread until the fixture ends. So Django has to be told that queries of this
    thread do not block it.
    """
    from playwright.sync_api import sync_playwright

    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium-headless-shell"), args=_OPTIONS)
            yield browser
            browser.close()
    finally:
        del os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"]


@pytest.fixture
def open_page(chromium: Browser, live_server: Any) -> Iterator[OpenPage]:
    """Return a function that opens a page of the site as a user; its options are those of a browser context.

    The test fails if a script has an error, or if the site does.
    """
    contexts, faults = [], []

    def note(response: Any) -> None:
        if response.status >= 500:
            faults.append(f"{response.status} for {response.url}")

    def opened(user: User, **options: Any) -> Page:
        client = Client()
        client.force_login(user)
        name = settings.SESSION_COOKIE_NAME
        context = chromium.new_context(base_url=live_server.url, **options)
        contexts.append(context)
        context.set_default_timeout(_PATIENCE)
        context.add_cookies([{"name": name, "value": client.cookies[name].value, "url": live_server.url}])
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("response", note)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert faults == []


@pytest.fixture(autouse=True)
def _afresh() -> None:
    """Forget the rules, blocks and allows of the test before."""
    rules.forget()
    access.clear()


def staff(*permissions: str) -> User:
    """Make a member of the staff with these permissions; with all permissions if none is given."""
    number = User.objects.count() + 1
    user = User.objects.create(username=f"staff{number}", is_staff=True, is_superuser=not permissions)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    return user


@pytest.fixture
def admin_page(open_page: OpenPage) -> Page:
    """Return a page of the admin's index, as a user who may do everything."""
    page = open_page(staff())
    page.goto("/admin/")
    return page


class Customer:
    """The account acme with an API key called "acme mobile", and its requests to the demo's API."""

    def __init__(self, site: str) -> None:
        user = User.objects.create(username="acme")
        self.account = Account.objects.create(identifier="acme", name="Acme")
        self.api_key, self._secret = ApiKey.objects.issue(name="acme mobile", user=user, account="acme")
        self._site = site

    def ask(self, page: Page) -> int:
        """Make one request, beside what the page shows, and return the status."""
        headers = {"Authorization": f"Api-Key {self._secret}"}
        return page.request.get(f"{self._site}/api/time/", headers=headers).status


@pytest.fixture
def customer(live_server: Any) -> Customer:
    """Return a customer of the demo's API."""
    return Customer(live_server.url)
