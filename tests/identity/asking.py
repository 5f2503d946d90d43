"""Ask the views of a project who makes a request, with the settings that docs/requests/who.md shows."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from django.conf import settings
from django.test import Client, override_settings
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from ratelimits.identity import Identity, identify
from ratelimits.testing import override_rules
from tests.support.snippets import ROOT

_PAGE = (ROOT / "docs" / "requests" / "who.md").read_text()
#: The code block of each section that has one, by the heading.
BLOCKS = {
    heading: block
    for heading, text in re.findall(r"^## (.+)\n((?:(?!^## ).*\n?)*)", _PAGE, re.MULTILINE)
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
}


class Who(APIView):
    """Answer who makes the request."""

    def get(self, request: Request) -> Response:
        return Response(identify(request)._asdict())


def ask(path: str, authorization: str = "") -> Identity:
    """Return who makes a request with this header."""
    answer = Client(headers={"Authorization": authorization}).get(path).json()
    answered: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in answer.items()
    }
    return Identity(**answered)


def statuses(path: str, *authorizations: str, kind: str) -> list[int]:
    """Return the status of a request with each header, in order. A rule of this kind admits two of them."""
    with override_rules([{"name": "two", "rate": "2/hour", "key_kind": kind}]):
        return [Client(headers={"Authorization": one}).get(path).status_code for one in authorizations]


@contextmanager
def recipe(heading: str, app: str = "shop") -> Iterator[ModuleType]:
    """Use the settings of a section of the page in the block. `app` is the label of the app with pretix's models."""
    code, _comment, lines = BLOCKS[heading].partition("# shop/settings.py\n")
    callers = ModuleType("shop.callers")
    exec(compile(code, heading, "exec"), callers.__dict__)
    changed: dict[str, Any] = {"RATELIMITS": dict(settings.RATELIMITS)}
    exec(compile(lines.replace("pretixbase", app), heading, "exec"), changed)
    sys.modules[callers.__name__] = callers
    try:
        with override_settings(RATELIMITS=changed["RATELIMITS"]):
            yield callers
    finally:
        del sys.modules[callers.__name__]
