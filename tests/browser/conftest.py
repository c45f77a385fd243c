"""The report in a real Chromium, in the environment of its own that `make test-report` makes."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

AXE = Path(sys.prefix) / "node_modules" / "axe-core" / "axe.min.js"
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1280,900",
)  # fmt: skip
# Far away: a page's time depends on the machine's load.
PATIENCE_SECONDS = 120


class Browser:
    """A window, with its requests and complaints."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.run = driver.execute_script

    def open(self, address: str | Path) -> None:
        self.driver.get("about:blank")
        for kind in ("browser", "performance"):
            self.driver.get_log(kind)
        self.driver.get(address.as_uri() if isinstance(address, Path) else address)

    def wait(self, script: str) -> None:
        """Wait until the expression is true."""
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, PATIENCE_SECONDS).until(
            lambda driver: driver.execute_script(f"return Boolean({script})")
        )

    def show(self, element: str) -> None:
        self.run(f"document.getElementById('{element}').scrollIntoView()")

    def open_rollouts(self) -> None:
        self.show("rollouts")
        self.wait("document.querySelector('#groups article') !== null")

    def resize(self, width: int, height: int, scheme: str = "light") -> None:
        command = self.driver.execute_cdp_cmd
        is_phone = width < 600
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone}
        command("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        command("Emulation.setEmulatedMedia", {"features": features})

    def requests(self) -> list[str]:
        """Return the addresses that were asked for since the page was opened."""
        messages = (json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance"))
        return [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[str]:
        """Return errors and warnings of the console: a breach of the page's policy is one."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def breaches_of_accessibility(self) -> list[str]:
        if not AXE.exists():
            pytest.skip("axe-core is not here: make test-report installs it")
        self.run(AXE.read_text(encoding="utf-8"))
        found = self.driver.execute_async_script(
            "axe.run(document, {resultTypes: ['violations']}).then(arguments[0], error => arguments[0](`${error}`))"
        )
        return [
            f"{breach['id']}: {node['html'][:200]} {node['failureSummary'][:300]}"
            for breach in found["violations"]
            for node in breach["nodes"]
        ]


@pytest.fixture(scope="session")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    webdriver = pytest.importorskip(
        "selenium.webdriver", reason="the browser has an environment of its own: make test-report"
    )
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("make test-report runs it after apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*_FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    made.set_script_timeout(PATIENCE_SECONDS)
    yield Browser(made)
    made.quit()


@pytest.fixture
def browser(window: Browser) -> Browser:
    window.resize(1280, 900)
    return window
