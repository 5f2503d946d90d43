from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.management import CommandError, call_command


def script(tmp_path: Path, rule: Any, **options: Any) -> str:
    (tmp_path / "rule.json").write_text(json.dumps(rule))
    out = io.StringIO()
    call_command("ratelimits_script", str(tmp_path / "rule.json"), stdout=out, **options)
    return out.getvalue()


BUCKET = {"algorithm": "token_bucket", "capacity": 10, "rate": 5, "period": 1}
LOG = {"algorithm": "sliding_log", "capacity": 10, "period": 1}


def test_it_prints_the_script_that_the_server_takes(tmp_path: Path, redis_client: redis.Redis) -> None:
    text = script(tmp_path, [BUCKET, LOG])
    assert redis_client.script_load(text)
    assert "LTRIM" in text
    assert "LTRIM" not in script(tmp_path, BUCKET)


def test_it_counts_in_meters_only_if_asked(tmp_path: Path) -> None:
    assert "HINCRBY" not in script(tmp_path, BUCKET)
    assert "HINCRBY" in script(tmp_path, BUCKET, meters=1)


@pytest.mark.parametrize(
    ("rule", "options", "error"),
    [
        ({"algorithm": "token_bucket"}, {}, "capacity"),
        (BUCKET, {"meters": -1}, "--meters must be 0 or more"),
    ],
)
def test_wrong_input_is_an_error(tmp_path: Path, rule: Any, options: Any, error: str) -> None:
    with pytest.raises(CommandError, match=error) as raised:
        script(tmp_path, rule, **options)
    assert raised.value.returncode == 2


def test_a_file_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(CommandError, match="No such file"):
        call_command("ratelimits_script", "/nowhere/rule.json")
