"""A page from disk in headless Chromium, without a network. `python tests/browser.py PAGE ... FOLDER` takes its pictures."""

import os
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
WIDTHS, SCHEMES = (1280, 400), ("light", "dark")


@contextmanager
def opened(file: Path, width: int = 1280, scheme: str = "light", height: int = 900):
    """(page, problems): what goes wrong, and whatever is asked for beside the file itself, is put into problems."""
    from playwright.sync_api import sync_playwright

    problems: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_FLAGS)
        try:
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, offline=True)
            page = context.new_page()
            page.on("console", lambda message: problems.append(f"console: {message.text}"))
            page.on("pageerror", lambda error: problems.append(f"error: {error}"))
            page.on("request", lambda request: request.url == file.as_uri() or problems.append(f"request: {request.url}"))
            page.goto(file.as_uri())
            yield page, problems
        finally:
            browser.close()


def wait_until(page, expression: str, argument=None) -> None:
    """Until a JavaScript function gives true; playwright's own way would evaluate text, which the page's policy forbids."""
    for _ in range(200):
        if page.evaluate(expression, argument):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"not within 10 s: {expression}")


def show_everything(page) -> None:
    """Scroll over the page, so that every figure that can be seen is drawn."""
    for top in range(0, page.evaluate("document.body.scrollHeight") + 4000, 500):
        page.evaluate(f"window.scrollTo(0, {top})")
        page.wait_for_timeout(40)
    wait_until(page, "() => [...document.querySelectorAll('.figure')].every(f => f.dataset.drawn || !f.checkVisibility())")
    page.evaluate("window.scrollTo(0, 0)")


def main() -> None:
    *files, folder = map(Path, sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        for width in WIDTHS:
            for scheme in SCHEMES:
                with opened(file.resolve(), width, scheme, height=1700) as (page, problems):
                    show_everything(page)
                    page.screenshot(path=folder / f"{file.stem}_{scheme}_{width}.png")
                    assert not problems, problems


if __name__ == "__main__":
    main()
