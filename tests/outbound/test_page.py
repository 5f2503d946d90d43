"""Run the snippets of docs/outbound.md."""

from __future__ import annotations

import asyncio
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.entry_points import begin_afresh
from tests.support.rows import rule

pytestmark = pytest.mark.django_db(transaction=True)

PAGE = (Path(__file__).parents[2] / "docs" / "outbound.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_task_of_the_page_is_limited() -> None:
    names: dict[str, Any] = {"__name__": __name__, "push_to_crm": [].append}
    (snippet,) = [one for one in SNIPPETS if "shared_task" in one]
    exec(snippet, names)
    task = names["sync_customer"]
    assert (task.quota, task.acks_late, task.name) == ("crm-sync", True, f"{__name__}.sync_customer")
    task(7)


def test_the_snippets_on_waiting_run(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_afresh(monkeypatch)
    rule("mail", "token_bucket", scope="mailer-api", capacity=2, rate=1, period=60)
    rule("tokens", "token_bucket", scope="llm", meter="tokens", capacity=3000, rate=3000, period=60)
    sent: list[str] = []

    async def send_mail_async() -> None:
        sent.append("async")

    names: dict[str, Any] = {
        "send_mail": lambda: sent.append("sync"),
        "send_mail_async": send_mail_async,
        "postpone": sent.append,
        "ask_model": lambda: SimpleNamespace(tokens=40),
    }
    for snippet in SNIPPETS[:4]:
        if "async with" in snippet:
            exec(f"async def snippet():\n{textwrap.indent(snippet, '    ')}", names)
            asyncio.run(names["snippet"]())
        else:
            exec(snippet, names)
    assert sent[:2] == ["sync", "async"]
    assert sent[2:] == [pytest.approx(60, abs=5)]
    with names["permits"]("llm", cost={"tokens": 2950}, max_wait=0):
        pass
