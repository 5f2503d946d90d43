"""Test that a browser's fetch can read Retry-After, wait, and then succeed."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User

from ratelimits.models import Rule
from tests.browser.conftest import OpenPage

pytestmark = [pytest.mark.system, pytest.mark.django_db(transaction=True)]

#: Make three requests. After a refusal, wait as long as Retry-After says. Return all statuses.
SCRIPT = """
async (url) => {
  const statuses = []
  for (let request = 0; request < 3; request++) {
    for (;;) {
      const response = await fetch(url)
      statuses.push(response.status)
      if (response.status !== 429) break
      await new Promise(done => setTimeout(done, 1000 * Number(response.headers.get('Retry-After'))))
    }
  }
  return statuses
}
"""


def test_a_script_waits_as_told_and_wastes_no_request(open_page: OpenPage) -> None:
    Rule.objects.create(name="pace", key_kind="caller", scope="time", algorithm="gcra", capacity=1, rate=1, period=1)
    page = open_page(User.objects.create(username="ann"))
    page.goto("/")
    statuses: Any = page.evaluate(SCRIPT, "/api/time/")
    assert statuses.count(200) == 3
    assert statuses.count(429) <= 2
    # No request was refused twice.
    assert "429, 429" not in ", ".join(map(str, statuses))
