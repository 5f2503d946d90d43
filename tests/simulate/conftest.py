from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command

Simulate = Callable[..., tuple[list[Any], str, int]]


def jsonl(*lines: Any) -> str:
    return "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)


@pytest.fixture
def simulate(tmp_path: Path) -> Simulate:
    """Run the command in this process; return its results, its standard error, and its exit status."""

    def run(rule: Any = None, trace: str | None = None, batch: str | None = None) -> tuple[list[Any], str, int]:
        options = {}
        for name, text in (("rule", rule and json.dumps(rule)), ("trace", trace), ("batch", batch)):
            if text is not None:
                (tmp_path / name).write_text(text)
                options[name] = str(tmp_path / name)
        out, error, status = io.StringIO(), io.StringIO(), 0
        try:
            call_command("ratelimits_simulate", **options, stdout=out, stderr=error)
        except SystemExit as stopped:
            status = int(stopped.code or 0)
        return [json.loads(line) for line in out.getvalue().splitlines()], error.getvalue(), status

    return run
