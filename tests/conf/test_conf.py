from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from django.test import override_settings

from ratelimits.conf import DEFAULTS, Conf, conf


def account_of(request: object) -> str:
    return "acme"


def test_a_setting_has_its_default_when_the_project_names_none() -> None:
    with override_settings(RATELIMITS={}):
        assert conf.SHARDS == 64
        assert conf.ACCOUNT is None


def test_the_project_has_the_last_word_and_a_change_is_seen_at_once() -> None:
    with override_settings(RATELIMITS={"SHARDS": 8}):
        assert conf.SHARDS == 8
        with override_settings(RATELIMITS={"SHARDS": 4}):
            assert conf.SHARDS == 4
        assert conf.SHARDS == 8


def test_the_account_callable_may_be_a_dotted_path() -> None:
    with override_settings(RATELIMITS={"ACCOUNT": f"{__name__}.account_of"}):
        assert conf.ACCOUNT is account_of


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no setting 'SHARDSS'"):
        getattr(conf, "SHARDSS")  # noqa: B009


def test_every_default_is_declared_with_a_type() -> None:
    assert set(DEFAULTS) == set(Conf.__annotations__)


def test_the_documentation_names_every_setting_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
    documented = dict(re.findall(r"^\| `([A-Z_]+)` \| `([^`]*)` \|", page, re.MULTILINE))
    assert {name: ast.literal_eval(default) for name, default in documented.items()} == DEFAULTS
