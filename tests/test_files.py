"""Test that texts in files are no formulae and are read back as they were, and that files need little memory."""

from __future__ import annotations

import csv
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from ratelimits.files import SIZE, FileDownload, csv_lines, encoded, neutral, restorable, restored

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


@given(st.lists(st.tuples(TEXTS, st.integers(-9, 9)), max_size=5))
def test_csv_has_the_texts_without_formulae_and_the_numbers_as_they_are(rows: list[tuple[str, int]]) -> None:
    lines = list(csv_lines(["text", "number"], {"number"}, ([text, str(number)] for text, number in rows)))
    assert all(line.endswith("\n") and not line.endswith("\r\n") for line in lines)
    read = [["text", "number"], *([neutral(text), str(number)] for text, number in rows)]
    assert list(csv.reader(iter(lines))) == read


def test_pieces_are_joined_into_chunks_of_about_one_size() -> None:
    pieces = ["ä" * 1000] * 200
    chunks = list(encoded(pieces))
    assert b"".join(chunks).decode() == "".join(pieces)
    assert [len(chunk.decode()) for chunk in chunks] == [66_000, 66_000, 66_000, 2_000]
    assert SIZE <= 66_000 < SIZE + 1000


async def test_a_download_under_asgi_asks_for_a_chunk_when_the_last_one_was_sent() -> None:
    asked: list[int] = []

    def chunks() -> Iterator[bytes]:
        for number in range(3):
            asked.append(number)
            yield bytes([number])

    download = FileDownload(chunks(), "text/plain", "a=1.txt")
    assert download["Content-Disposition"] == 'attachment; filename="a=1.txt"'
    sent = [(chunk, len(asked)) async for chunk in download]
    assert sent == [(b"\0", 1), (b"\1", 2), (b"\2", 3)]
