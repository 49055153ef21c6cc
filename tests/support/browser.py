"""A page as headless Chromium shows it, where Chromium is installed."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
OWN = ("data:", "blob:", "chrome:")
# Of every plot: how many marks its first set of axes holds.
MARKS = """return [...document.querySelectorAll('.plot')].map(
    plot => plot.querySelectorAll('svg .points path, svg .point, svg .js-line').length)"""


class Browser:
    """One window.

    Args:
        driver: Selenium's.
    """

    def __init__(self, driver: Any) -> None:
        self.driver, self.width = driver, 0

    def open(self, page: Path, width: int, scheme: str = "light") -> None:
        """Show a file in a window this wide, in CSS pixels."""
        self.width = width
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        wanted = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)
        self.driver.get(page.as_uri())

    def run(self, script: str) -> Any:
        """What JavaScript returns."""
        return self.driver.execute_script(script)

    def marks(self) -> list[int]:
        """Drawn marks (points, bars, lines) of every plot."""
        return self.run(MARKS)

    def colour(self, selector: str, what: str = "backgroundColor") -> str:
        """A computed colour."""
        return self.run(f"return getComputedStyle(document.querySelector({json.dumps(selector)})).{what}")

    def overflow(self) -> int:
        """CSS pixels that the page is wider than its window."""
        # A narrow device shows a page that is too wide smaller instead.
        wide, inside = self.run("const r = document.documentElement; return [r.scrollWidth, r.clientWidth]")
        return wide - min(inside, self.width)

    def complaints(self) -> list[str]:
        """What was said on the console since it was asked last."""
        return [f"{line['level']}: {line['message']}" for line in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses asked for since the last call, but for data and the browser's own first page."""
        lines = [json.loads(line["message"])["message"] for line in self.driver.get_log("performance")]
        asked = [m["params"]["request"]["url"] for m in lines if m["method"] == "Network.requestWillBeSent"]
        return [address for address in asked if not address.startswith(OWN)]


@contextmanager
def browser() -> Iterator[Browser]:
    """A window for a test; the test is skipped where there is no Chromium."""
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if not all(programs):
        pytest.skip("needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(programs[1]))
        try:
            yield Browser(driver)
        finally:
            driver.quit()
