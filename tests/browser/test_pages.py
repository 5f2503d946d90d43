"""Test every page of the admin in a real browser: its width on a phone, and what axe-core says of it, light and dark.

With `--screenshots DIR`, also write a picture of each page in each look, and the smaller pictures of README.md.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import pytest

from tests.browser.conftest import OpenPage, staff
from tests.browser.filled import Filled, fill
from tests.support.reports.invoices import close, spend
from tests.support.reports.priced import priced

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [
    pytest.mark.system,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("fsync_at_once"),
]


class ViewportSize(TypedDict):
    """A size in pixels, as Playwright takes it."""

    width: int
    height: int


SCREEN, PHONE = ViewportSize(width=1280, height=800), ViewportSize(width=390, height=844)
#: GitHub does not shrink a picture of this width, so people can read its text.
README_WIDTH = 800
LOOKS: Mapping[str, tuple[ViewportSize, Literal["light", "dark"]]] = {
    "light": (SCREEN, "light"),
    "phone": (PHONE, "light"),
    "phone-dark": (PHONE, "dark"),
    "dark": (SCREEN, "dark"),
}
#: The rules that axe-core checks in a look: all of them, or those that depend on the look.
RULES: Mapping[str, Mapping[str, Any]] = {
    "light": {},
    "dark": {"runOnly": ["color-contrast", "link-in-text-block"]},
}
#: Returns the parts of a page that scroll sideways but cannot be reached with a keyboard. (axe-core finds them too, but
#: each of its runs takes as long as a page.)
_UNREACHABLE = """() => [...document.querySelectorAll('#content *')].filter((part) =>
    part.scrollWidth > part.clientWidth && ['auto', 'scroll'].includes(getComputedStyle(part).overflowX)
    && part.tabIndex < 0 && !part.querySelector('a, input, select, button, summary, [tabindex]')
).map((part) => part.outerHTML.slice(0, 200))"""
#: Returns the tables whose hidden columns no shadow shows. Tables in closed details are not shown.
_HIDING = """() => [...document.querySelectorAll('#content table')].filter((table) => {
    if (!table.checkVisibility()) return false;
    let box = table.parentElement;
    const scrolls = () => ['auto', 'scroll'].includes(getComputedStyle(box).overflowX);
    while (box.id !== 'content' && !scrolls()) box = box.parentElement;
    return table.scrollWidth > box.clientWidth && !getComputedStyle(box).backgroundAttachment.includes('local');
}).map((table) => table.parentElement.outerHTML.slice(0, 200))"""
#: The pages with colours of our own; the other pages have only Django's, which need not be checked twice.
COLOURED = {"index", "status", "shadow", "inspector", "new-rule", "trial", "changes", "import-differences"}
#: Pages that look much like another one, so that they need no picture.
ALIKE = {
    "adjustment-effect",
    "resolve",
    "for-whom",
    "quick-try",
    "status-month",
    "search",
    "rule",
    "block",
    "reset",
    "override",
    "import",
    "usage",
}
#: What axe-core examines: our part of each page. The header, the sidebar and the breadcrumbs are Django's, and so are
#: these widgets of its forms and lists, each with the fault that axe-core finds in it.
STOCK = {
    ".select2": "aria-input-field-name: the box of an autocomplete has no name (its label names the hidden select)",
    ".vDateField, .vTimeField": "label: the label of a moment belongs to neither of its two inputs",
    "#searchbar": "label-title-only: the search of a list has no label, only a description",
}
_EXAMINED = {
    "include": [["#content"]],
    "exclude": [[selector] for selectors in STOCK for selector in selectors.split(", ")],
}
#: axe-core reports only faults in full. It does not load the style sheets again, which takes it long: only its rule on
#: sounds that play by themselves, which no page has, would use them.
_ONLY_FAULTS = {"resultTypes": ["violations"], "preload": False}
#: Returns the serious faults that axe-core finds. To bring all that it found here would take longer.
_SERIOUS = """async ([context, options]) => (await axe.run(context, options)).violations
    .filter((rule) => ['serious', 'critical'].includes(rule.impact))
    .flatMap((rule) => rule.nodes.map((node) => [rule.id, node.html, node.failureSummary]))"""
_APP = "/admin/ratelimits"


def _at(address: str) -> Callable[[Page, Filled], None]:
    """Return what opens an address, into which the fields of `filled` are put."""

    def opened(page: Page, filled: Filled) -> None:
        response = page.goto(address.format(**filled._asdict()))
        assert response is not None
        assert response.status == 200, address

    return opened


def _new_rule(page: Page, filled: Filled) -> None:
    _at(f"{_APP}/rule/add/?name=burst&algorithm=token_bucket&capacity=10&rate=5&period=1")(page, filled)
    page.locator("[data-ratelimits-trial] svg").first.wait_for()


def _block(page: Page, filled: Filled) -> None:
    _at(f"{_APP}/access/add/")(page, filled)
    page.locator("#id_target").fill("127.0.0.0/24")
    page.locator("#id_reason").fill("a scan")
    page.locator("[name=_save]").click()
    page.locator("[name=_confirmed]").wait_for(state="attached")


def _finalise(page: Page, filled: Filled) -> None:
    _at("/admin/ratelimits_billing/report/open/")(page, filled)
    page.locator("button[name=all]").click()
    page.locator("[name=shown]").first.wait_for(state="attached")


def _import(page: Page, filled: Filled) -> None:
    _at(f"{_APP}/planmembership/import/")(page, filled)
    lines = ["key,plan", f"{filled.key},free", "user:1,pro", "user:2,gold", "user 3,pro"]
    file: Any = {"name": "memberships.csv", "mimeType": "text/csv", "buffer": "\n".join(lines).encode()}
    page.locator("[type=file]").set_input_files(file)
    page.locator("#content-main [type=submit]").click()
    page.locator("[name=change_reason]").wait_for()


def _undo(page: Page, filled: Filled) -> None:
    _at(f"{_APP}/change/?table=rule")(page, filled)
    page.get_by_role("link", name="Undo", exact=True).or_(
        page.get_by_role("link", name="撤销", exact=True)
    ).first.click()
    page.locator("[name=_confirmed]").wait_for(state="attached")


def _adjust(page: Page, filled: Filled) -> None:
    _at("/admin/ratelimits_billing/adjustment/add/")(page, filled)
    page.locator("#id_account").fill("acme")
    page.locator("#id_period_start_0").fill("2026-01-01")
    page.locator("#id_period_start_1").fill("00:00:00")
    page.locator("#id_meter").fill("requests")
    page.locator("#id_quantity").fill("1000000")
    page.locator("#id_reason").fill("goodwill")
    page.locator("[name=_save]").click()
    page.locator("[name=_effect_seen]").wait_for(state="attached")


def _move(page: Page, filled: Filled) -> None:
    _at(f"{_APP}/account/move/?text=acme")(page, filled)
    page.locator("#id_to_1").check()
    page.locator("#id_when_2").check()
    page.locator("#id_reason").fill("acme was sold")
    page.locator("#content-main [type=submit]").click()
    page.locator("[name=_confirmed]").wait_for(state="attached")


def _resolve(page: Page, filled: Filled) -> None:
    _at("/admin/ratelimits_usage/quarantinedbatch/")(page, filled)
    page.locator("#action-toggle").check()
    page.locator("[name=action]").select_option("discard")
    page.locator("#changelist-form [name=index]").click()
    page.locator("[name=post]").wait_for(state="attached")


PAGES: Mapping[str, Callable[[Page, Filled], None]] = {
    "index": _at("/admin/"),
    "status": _at(f"{_APP}/status/"),
    "status-month": _at(f"{_APP}/status/?window=month"),
    "shadow": _at("/admin/ratelimits_usage/shadow/"),
    "enforce": _at(f"{_APP}/rule/{{shadow}}/enforce/"),
    "search": _at(f"{_APP}/inspect/?q=acme"),
    "inspector": _at(f"{_APP}/inspect/?q={{key}}"),
    "rules": _at(f"{_APP}/rule/"),
    "new-rule": _new_rule,
    "rule": _at(f"{_APP}/rule/{{rule}}/change/"),
    "trial": _at(
        f"{_APP}/rule/trial/?rule={{rule}}&algorithm=token_bucket&capacity=10&rate=5&period=1&key_kind=api_key&mode=enforce"
    ),
    "blocks": _at(f"{_APP}/access/"),
    "block": _at(f"{_APP}/access/add/"),
    "block-confirm": _block,
    "reset": _at(f"{_APP}/keyreset/add/?key={{key}}&account=acme&rule=hourly"),
    "grant": _at(f"{_APP}/access/grant/?key={{key}}&account=acme&rule=burst&extra=50"),
    "for-whom": _at(f"{_APP}/access/grant/?key=acme"),
    "quick-try": _at(f"{_APP}/rule/yesterday/?limit=50+a+minute&key_kind=caller&scope=*"),
    "overrides": _at(f"{_APP}/keyoverride/"),
    "override": _at(f"{_APP}/keyoverride/add/"),
    "import": _at(f"{_APP}/planmembership/import/"),
    "import-differences": _import,
    "reports": _at("/admin/ratelimits_billing/report/"),
    "report": _at("/admin/ratelimits_billing/report/{report}/change/"),
    "open-periods": _at("/admin/ratelimits_billing/report/open/?running=1"),
    "finalise": _finalise,
    "adjustment": _at("/admin/ratelimits_billing/adjustment/add/"),
    "adjustment-effect": _adjust,
    "move": _at(f"{_APP}/account/move/?text=acme"),
    "move-confirm": _move,
    "resolve": _resolve,
    "changes": _at(f"{_APP}/change/"),
    "undo": _undo,
    "ledger": _at("/admin/ratelimits_usage/line/"),
    "usage": _at("/admin/ratelimits_usage/periodusage/"),
}


@pytest.fixture
def screenshots(pytestconfig: pytest.Config) -> Path | None:
    """Return the folder for pictures, or None."""
    folder: str | None = pytestconfig.option.screenshots
    if folder is None:
        return None
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder)


def _faults(page: Page, name: str, look: str, axe: str) -> Iterator[str]:
    """Yield what is wrong with a page as it looks now."""
    wide, window = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    if wide > window:
        yield f"it is {wide} pixels wide"
    table = page.locator("#changelist .results")
    if look == "light" and table.count():
        hidden = table.evaluate("list => list.scrollWidth - list.clientWidth")
        if hidden > 0:
            yield f"its list is {hidden} pixels too wide"
    if look.startswith("phone"):
        yield from (f"no shadow shows hidden columns: {part}" for part in page.evaluate(_HIDING))
    yield from (f"no key scrolls {part}" for part in page.evaluate(_UNREACHABLE))
    if look in RULES and (look != "dark" or name in COLOURED):
        if page.evaluate("typeof axe === 'undefined'"):
            page.evaluate(axe)
        for rule, html, failure in page.evaluate(_SERIOUS, [_EXAMINED, {**_ONLY_FAULTS, **RULES[look]}]):
            yield f"{rule}: {html[:300]} {failure}"


def test_every_page_fits_its_screen_has_no_serious_fault_and_speaks_the_browser_s_language(
    open_page: OpenPage, screenshots: Path | None
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    axe, filled = Axe().axe_script, fill()
    page, chinese = open_page(filled.user), open_page(filled.user, locale="zh-CN", viewport=SCREEN)
    faults = []
    for name, opened in PAGES.items():
        page.set_viewport_size(SCREEN)
        page.emulate_media(color_scheme="light")
        opened(page, filled)
        for look, (size, scheme) in LOOKS.items():
            page.set_viewport_size(size)
            page.emulate_media(color_scheme=scheme)
            # Django's links change their colour slowly. Each frame of this takes processor time.
            page.evaluate("document.getAnimations().forEach(one => one.finish())")
            faults += [f"{name}, {look}: {fault}" for fault in _faults(page, name, look, axe)]
            _picture(page, screenshots, name, look)
        opened(chinese, filled)
        faults += [f"{name}, in Chinese: {fault}" for fault in _faults_in_chinese(chinese)]
        _picture(chinese, screenshots, name, "zh-hans")
    assert faults == [], "\n".join(faults)


def _faults_in_chinese(page: Page) -> Iterator[str]:
    """Yield what is wrong with a page for a browser that asks for Chinese."""
    language, wide, window = page.evaluate(
        "[document.documentElement.lang, document.documentElement.scrollWidth, innerWidth]"
    )
    if language != "zh-hans":
        yield f"it speaks {language}"
    if wide > window:
        yield f"it is {wide} pixels wide"


def test_a_rule_a_refusal_and_a_report_as_readme_shows_them(open_page: OpenPage, screenshots: Path | None) -> None:
    page = open_page(staff(), viewport=ViewportSize(width=README_WIDTH, height=800))
    page.goto(f"{_APP}/rule/add/?name=burst&algorithm=token_bucket&capacity=3&rate=3&period=60")
    page.locator("#toggle-nav-sidebar").click()
    page.get_by_text("3 requests per minute, bursts to 3, per caller.").wait_for()
    _picture_for_readme(page, screenshots, "new-rule", ".breadcrumbs", 500)
    page.locator("[name=_save]").click()
    page.locator(".success").wait_for()

    answers = [page.goto("/api/time/?zone=Europe/Paris") for _request in range(4)]
    assert [answer and answer.status for answer in answers] == [200, 200, 200, 429]
    shown = page.locator(".response-info").inner_text()
    for text in ("HTTP 429 Too Many Requests", "Retry-After: ", 'RateLimit-Policy: "burst";q=3;w=60', "RateLimit: "):
        assert text in shown
    _picture_for_readme(page, screenshots, "refused", "body", 440)

    spend(priced(included=1_000, unit_price="0.002"), "2026-01-15", 1_250)
    (report,) = close("2026-02-03")
    page.goto(f"/admin/ratelimits_billing/report/{report.pk}/change/")
    page.get_by_text("owed for this report up to this version: 0.50 EUR").wait_for()
    _picture_for_readme(page, screenshots, "report", ".form-row", 620)


def _picture_for_readme(page: Page, folder: Path | None, name: str, top: str, height: int) -> None:
    """Write a picture of the page from the top of a part of it on."""
    page.set_viewport_size(ViewportSize(width=README_WIDTH, height=height))
    page.locator(top).first.evaluate("part => part.scrollIntoView()")
    _picture(page, folder, name, "readme")


def _picture(page: Page, folder: Path | None, name: str, look: str) -> None:
    """Write a picture of what the window shows, as WebP, which takes a third of the bytes of a PNG."""
    if folder is None or name in ALIKE or look == "phone-dark":
        return
    options = {"format": "webp", "quality": 36}
    picture = page.context.new_cdp_session(page).send("Page.captureScreenshot", options)
    (folder / f"{name}.{look}.webp").write_bytes(b64decode(picture["data"]))
