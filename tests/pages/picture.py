"""`make picture`: the README's picture of the app, taken from the app."""

from __future__ import annotations

from pathlib import Path

from tests.pages.server import chromium, open_page, serve

PICTURE = Path(__file__).with_name("app.png")


def main() -> None:
    with serve() as server, chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 1200}, color_scheme="light")
        open_page(page, server.url)
        page.wait_for_timeout(1500)  # fonts and the first drawing
        page.screenshot(path=PICTURE)


if __name__ == "__main__":
    main()
