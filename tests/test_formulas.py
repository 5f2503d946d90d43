"""Test that texts in files are no formulae, and are read back as they were."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ratelimits.formulas import neutral, restorable, restored

TEXTS = st.text(alphabet="'=+-@＝;|\t\r\n \"a1", max_size=12)


@given(TEXTS)
def test_every_text_comes_back_and_none_is_a_formula(text: str) -> None:
    written = restorable(text)
    assert restored(written) == text
    assert neutral(written) == written


def test_only_what_looks_like_a_formula_is_marked() -> None:
    assert restorable("it's 5 - 3 = 2") == "it's 5 - 3 = 2"
    assert restorable("=1+1") == "'=1+1"
    assert restorable("'=1+1") == "''=1+1"
