from __future__ import annotations

from django.core import checks
from django.test import override_settings


def test_a_mistyped_setting_is_an_error_that_lists_the_known_ones() -> None:
    with override_settings(RATELIMITS={"NAMESPASE": "x"}):
        (error,) = [message for message in checks.run_checks(tags=["ratelimits"]) if message.id == "ratelimits.E001"]
    assert "NAMESPASE" in error.msg
    assert "NAMESPACE" in str(error.hint)
