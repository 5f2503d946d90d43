from __future__ import annotations

from collections import defaultdict
from dataclasses import fields, replace
from urllib.parse import quote, unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimits.usage.ledger.packet import CUM_MODULUS, Packet, Unreadable, canonical, content_digest, header_of, packet

#: Kind and count of a field -> to which of a line's eight counters it adds, in order.
ADDS = {
    ("a", "1"): (0, 1), ("a", "n"): (0,), ("a", "u"): (1,),
    ("d", "1"): (2, 3), ("d", "n"): (2,), ("d", "u"): (3,),
    ("r", "1"): (4, 5), ("r", "n"): (4,), ("r", "u"): (5,),
    ("s", "1"): (6, 7), ("s", "n"): (6,), ("s", "u"): (7,),
}  # fmt: skip

texts = st.one_of(
    st.sampled_from(["", "acme", "api_key:1"]),
    st.text(max_size=20).filter(lambda text: text.isprintable() or text in "\t\n\r\\"),
)
numbers = st.one_of(st.sampled_from([0, 1]), st.integers(0, 10**18 - 1))
subjects = st.tuples(numbers, texts, numbers, numbers, texts, texts)
batches = st.lists(
    st.tuples(st.sampled_from(sorted(ADDS)), subjects, st.integers(0, 10**12), st.booleans()), max_size=12
)


def name_of(sign: tuple[str, str], subject: tuple[int | str, ...], spelled_out: bool) -> bytes:
    """Return a field as the deciding script writes it, or with more letters escaped than necessary."""
    safe = "" if spelled_out else ":@.-_~"
    return "|".join(
        [sign[0], *(str(part) if isinstance(part, int) else quote(part, safe=safe) for part in subject), sign[1]]
    ).encode()


def sealed(counters: dict[bytes, int]) -> Packet:
    units = sum(count * (2 if name.endswith(b"1") else 1) for name, count in counters.items())
    identity = {b"#i": b"i", b"#s": b"1", b"#o": b"1", b"#r": b"r", b"#p": b"7", b"#f": b"", b"#t": b"2", b"#x": b"r"}
    identity |= {b"#q": b"3"}
    fields = {**identity, b"#c": b"%d" % ((7 + units) % CUM_MODULUS)}
    return packet(3, [*fields.items(), *((name, b"%d" % count) for name, count in counters.items())])


@given(batches)
def test_lines_are_what_the_fields_say_one_by_one(
    batch: list[tuple[tuple[str, str], tuple[int | str, ...], int, bool]],
) -> None:
    counters = {name_of(sign, subject, spelled): count for sign, subject, count, spelled in batch}
    expected: dict[tuple[int | str, ...], list[int]] = defaultdict(lambda: [0] * 8)
    for name, count in counters.items():
        kind, bin_, meter, rule, version, account, key, counted = name.decode().split("|")
        about = (unquote(account), unquote(key), unquote(meter), int(rule), int(version), int(bin_))
        for place in ADDS[kind, counted]:
            expected[about][place] += count
    read = sealed(counters)
    assert read.lines == tuple(sorted(canonical([*about, *counts]) for about, counts in expected.items()))
    assert read.previous_cum == 7


def test_a_batch_without_a_counter_has_no_lines() -> None:
    assert sealed({}).lines == ()


def test_the_digest_covers_each_value_of_a_batch() -> None:
    whole = sealed({b"a|0|m|0|0|a|k|1": 1})
    names = [field.name for field in fields(Packet) if field.name not in ("lines", "content")]
    others = [replace(whole, **{name: getattr(whole, name) * 2 or "i:1"}) for name in names]  # type: ignore[arg-type]
    digests = [content_digest(header_of(other), other.lines) for other in others]
    digests.append(content_digest(header_of(whole), [*whole.lines, *whole.lines]))
    assert len({whole.content, *digests}) == len(names) + 2


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (b"a|0|m|0|0|a|k", "is not kind"),
        (b"a|0|m|0|0|a|k|1|a|0|m|0|0|a|k|1", "is not kind"),
        (b"a|0|m|0|0|a|k|1|\n|a|0|m|0|0|a|k|1", "is not kind"),
        (b"a|0|m|0|0|a|#|1", "is not kind"),
        (b"a|00|m|0|0|a|k|1", "'00' instead of a number"),
        (b"a|0|m|0||a|k|1", "'' instead of a number"),
        (b"aa|0|m|0|0|a|k|1", "unknown kind: b'aa1'"),
        (b"a|0|m|0|0|a|k|", "unknown kind: b'a'"),
    ],
)
def test_a_field_that_no_script_writes_is_named(field: bytes, message: str) -> None:
    for others in ({}, {b"a|0|m|0|0|a|k|1": 1}):
        with pytest.raises(Unreadable, match=message):
            sealed({**others, field: 2})


def test_a_counter_that_the_database_cannot_hold_is_refused() -> None:
    with pytest.raises(Unreadable, match="too large for 64 bits"):
        sealed({b"a|0|m|0|0|a|k|n": 2**63 - 1, b"a|0|m|0|0|a|%6b|n": 1})
    with pytest.raises(Unreadable, match="too large for 64 bits"):
        sealed({b"a|0|m|0|0|a|k|1": 2**63})
