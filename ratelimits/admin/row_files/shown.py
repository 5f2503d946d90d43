"""The lines on the page that shows a file's differences: a section for each state, with at most `PER_PAGE` lines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlencode

from django.utils.translation import gettext as _

from ratelimits import unknown_names
from ratelimits.conf import conf
from ratelimits.models.accounts.named import former_accounts
from ratelimits.models.periods import periods_after
from ratelimits.row_files.comparing import PORTION, ComparedLine, LineState

#: Maximum number of lines that a section shows at once.
PER_PAGE = 200
#: The columns of an account from which its billing periods follow, and those from which its bills follow.
_OF_PERIODS = ("timezone", "billing_anchor")
_OF_BILLS = ("plan", *_OF_PERIODS)


class Section(NamedTuple):
    """The lines with the same state. `others` are links to pages with other lines of this state."""

    title: str
    state: str
    lines: list[ComparedLine]
    others: list[tuple[str, str]]


def page_of(text: str) -> int:
    """Return the page number in a text from a URL; 1 if the text is not a page number."""
    return max(1, int(text)) if text.isdecimal() and len(text) < 6 else 1


class ShownLines:
    """Keeps the lines that the page shows.

    If `chosen` names a state, the page with the number `page` shows lines of this state. Otherwise the page shows the
    first lines of several states.
    """

    def __init__(self, chosen: str, page: int) -> None:
        self._chosen = chosen if chosen in {*LineState} else ""
        self._page = page if self._chosen else 1
        states = [LineState(chosen)] if self._chosen else [LineState.ERROR, LineState.CHANGED, LineState.NEW]
        self._lines: dict[LineState, list[ComparedLine]] = {state: [] for state in states}
        self._counts = dict.fromkeys(states, 0)

    def add(self, line: ComparedLine) -> None:
        """Keep a line if the page shows it."""
        if line.state not in self._lines:
            return
        self._counts[line.state] += 1
        if (self._page - 1) * PER_PAGE < self._counts[line.state] <= self._page * PER_PAGE:
            self._lines[line.state].append(line)

    def sections(self, file: str, counts: Mapping[LineState, int]) -> list[Section]:
        """Return the sections, each with links to its other lines. `file` is the number of the file, for the links."""
        titles = {
            LineState.ERROR: _("Wrong lines: %(n)s"),
            LineState.CHANGED: _("Rows that change: %(n)s"),
            LineState.NEW: _("New rows: %(n)s"),
            LineState.UNCHANGED: _("Unchanged rows: %(n)s"),
        }

        def link(**query: Any) -> str:
            return "?" + urlencode({"file": file, **query})

        sections = []
        for state, title in titles.items():
            if not counts[state]:
                continue
            others = []
            if state not in self._lines:
                others.append((_("Show these rows"), link(show=state.value)))
            elif self._chosen:
                others.append((_("All differences"), link()))
                if self._page > 1:
                    others.append((_("Previous lines"), link(show=state.value, page=self._page - 1)))
                if self._page * PER_PAGE < counts[state]:
                    others.append((_("Next lines"), link(show=state.value, page=self._page + 1)))
            elif counts[state] > PER_PAGE:
                others.append((_("Show all rows"), link(show=state.value)))
            lines = self._lines.get(state, [])
            sections.append(Section(title % {"n": f"{counts[state]:,}"}, state.value, lines, others))
        return sections


class NotedLines:
    """Finds the lines of which a person should read something before the import, such as a key that nobody has.

    `is_chosen` says whether a new or changed line is looked up. `sentences_of` returns sentences about the rows of some
    such lines, by the value of the column `by`. After `finish`, `count` is the number of lines with a sentence. `first`
    has the first `PER_PAGE` of these lines, each with its number and its sentence.
    """

    def __init__(
        self,
        by: str,
        sentences_of: Callable[[Sequence[Any]], Mapping[str, str]],
        is_chosen: Callable[[ComparedLine], bool] = lambda line: True,
    ) -> None:
        self.count = 0
        self.first: list[tuple[int, str]] = []
        self._by, self._sentences_of, self._is_chosen = by, sentences_of, is_chosen
        self._waiting: list[ComparedLine] = []

    def add(self, line: ComparedLine) -> None:
        """Add a line. The rows of several lines are looked up together."""
        if line.state in (LineState.NEW, LineState.CHANGED) and self._is_chosen(line):
            self._waiting.append(line)
        if len(self._waiting) >= PORTION:
            self.finish()

    def finish(self) -> None:
        """Look up the last lines."""
        sentences = self._sentences_of([line.row for line in self._waiting])
        names = [(line.number, getattr(line.row, self._by)) for line in self._waiting]
        found = [(number, sentences[name]) for number, name in names if name in sentences]
        self.count += len(found)
        self.first += found[: PER_PAGE - len(self.first)]
        self._waiting = []


def unknown_keys() -> NotedLines:
    """Return what finds the lines whose key names a user or account that does not exist."""
    return NotedLines("key", lambda rows: unknown_names.in_keys([row.key for row in rows]))


def deleted_before() -> NotedLines:
    """Return what finds the lines that add an account whose text is still that of a deleted account's customer."""
    return NotedLines(
        "identifier",
        lambda rows: former_accounts(conf.DATABASE, [row.identifier for row in rows]),
        lambda line: line.state is LineState.NEW,
    )


def edited_terms() -> NotedLines:
    """Return what finds the lines that change the billing periods of an account, and says where these lie then."""
    return NotedLines(
        "identifier",
        lambda rows: {text: " ".join(said) for text, said in periods_after(conf.DATABASE, rows).items()},
        lambda line: _changes(line, _OF_PERIODS),
    )


def changes_bills(line: ComparedLine) -> bool:
    """Return whether a line adds an account, or changes a column from which the bills of its account follow."""
    return line.state is LineState.NEW or (line.state is LineState.CHANGED and _changes(line, _OF_BILLS))


def _changes(line: ComparedLine, columns: Collection[str]) -> bool:
    return any(change.field in columns for change in line.changes)
