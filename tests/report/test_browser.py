"""The page in a real browser: what is seen first, on any screen, by keyboard, and what the console
says.
"""

import re
import shutil
from pathlib import Path

import pytest
from helpers.report_runs import write, write_report

from hvdtrain.reporting import page, plot_style

pytestmark = [
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(
        not shutil.which("chromedriver"), reason="no chromedriver here (Debian: chromium-driver)"
    ),
]


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A browser with the report of a comparison over two hosts: five contenders, five repeats."""
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    root = tmp_path_factory.mktemp("shown")
    links = [{"from": a, "to": b, "gbit_s": 0.1} for a, b in (("a", "b"), ("b", "a"))]
    for kind, speed in (
        ("single", 300),
        ("allreduce", 43),
        ("ddp", 42),
        ("ps-sync", 33),
        ("ps-async", 120),
    ):
        workers, servers = 1 + (kind != "single"), int(kind.startswith("ps"))
        ranks = {"a": [0], "b": [1]} if not servers else {"a": [0, 1], "b": [2]}
        change = {
            "hosts": {name: {"ranks": own, "cores": 2} for name, own in ranks.items()},
            "network": {"pairs": links},
            "hardware": {
                "cpu": "A CPU",
                "cores": 2,
                "cores_usable": 2,
                "hosts": ["a", "b"],
                "gpus": [],
            },
        }
        for repeat in range(1, 6):
            own = change if workers > 1 else {}
            write(
                root / "runs",
                kind,
                workers,
                servers,
                repeat,
                speed * (1 + repeat / 100),
                change=own,
            )
    write_report([root], root)
    options = selenium.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = selenium.ChromeService(shutil.which("chromedriver"))
    browser = selenium.Chrome(options=options, service=service)
    browser.get((root / "report.html").as_uri())
    yield browser
    browser.quit()


def resize(browser, width, height):
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


@pytest.mark.timeout(240)  # with starting the browser, on a machine that does other work too
def test_the_answer_and_its_table_are_above_the_fold_and_nothing_is_wider_than_a_telephone(shown):
    resize(shown, 1280, 800)
    table = shown.execute_script(
        "return document.querySelector('table').getBoundingClientRect().bottom"
    )
    word = shown.execute_script(
        "const h = document.querySelector('h1'); return [h.innerText, h.offsetHeight]"
    )
    assert word[0] == "ONE MACHINE" and word[1] >= 48 and table <= 800
    top = shown.execute_script("return document.body.innerText")[:900]
    assert "Links between hosts: 0.100 Gbit/s" in top and top.index("because") < top.index(
        "next"
    ) < top.index("Links")
    resize(shown, 390, 844)
    assert shown.execute_script(
        "const e = document.documentElement; return e.scrollWidth == e.clientWidth"
    )


@pytest.mark.timeout(240)
def test_what_is_folded_away_opens_by_keyboard_and_the_console_is_silent(shown):
    from selenium.webdriver.common.keys import Keys

    folded = shown.find_elements("css selector", "summary")
    assert len(folded) >= 2
    for summary in folded:
        summary.send_keys(Keys.ENTER)
    opened = shown.execute_script("return document.querySelectorAll('details[open]').length")
    assert opened == len(folded)
    for summary in folded:
        summary.send_keys(Keys.SPACE)
    assert not shown.execute_script("return document.querySelectorAll('details[open]').length")
    assert shown.get_log("browser") == []


@pytest.mark.timeout(240)
def test_the_page_is_short_until_something_is_opened(shown):
    words = "const b = document.body.cloneNode(true); b.querySelectorAll('details, svg').forEach(e => e.remove());"
    assert len(shown.execute_script(f"{words} return b.textContent").split()) <= 900
    assert (
        1
        <= shown.execute_script("return document.querySelectorAll('body > .wide > svg').length")
        <= 5
    )


def test_text_has_contrast_on_light_and_on_dark_paper():
    def luminance(colour):
        linear = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in linear]
        return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    css = Path(page.__file__).with_name("page.css").read_text()
    texts, papers = (
        set(re.findall(rf"{role}: var\(--(\w+)\)", css)) for role in ("\\bcolor", "background")
    )
    assert texts and papers
    for theme in (0, 1):
        colours = plot_style.css(theme)
        for text in texts:
            for paper in papers:
                pair = sorted((luminance(colours[text]), luminance(colours[paper])), reverse=True)
                assert (pair[0] + 0.05) / (pair[1] + 0.05) >= 4.5, (theme, text, paper)
