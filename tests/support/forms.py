"""What the forms of a page send."""

from __future__ import annotations

from html.parser import HTMLParser


class Form(HTMLParser):
    """The values that the forms of an admin page send if nobody types anything."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.values: dict[str, str] = {}
        self._select = self._textarea = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        name, value = given.get("name") or "", given.get("value") or ""
        if tag == "input" and name and not name.startswith("_") and given.get("type") != "submit":
            if given.get("type") != "checkbox" or "checked" in given:
                self.values[name] = value or ("on" if given.get("type") == "checkbox" else "")
        elif tag == "select":
            self._select = name
        elif tag == "option" and self._select and ("selected" in given or self._select not in self.values):
            self.values[self._select] = value
        elif tag == "textarea":
            self._textarea = name
            self.values[name] = ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "select":
            self._select = ""
        elif tag == "textarea":
            self._textarea = ""

    def handle_data(self, data: str) -> None:
        if self._textarea:
            self.values[self._textarea] += data.removeprefix("\n")
