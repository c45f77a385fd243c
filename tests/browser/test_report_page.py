"""The page about runs as a person meets it: `make test-report` runs it in a headless Chromium."""

import json
import signal
import subprocess
import sys
import threading

import pytest

from megatron_rl.analysis.report.data import ReportData
from megatron_rl.analysis.report.page import build_page, load_library
from megatron_rl.analysis.report.server import ReportServer
from megatron_rl.errors import ExitCode
from megatron_rl.observe import run_folder
from megatron_rl.observe.run_folder import SavedConfig, Value
from tests.observed import metrics_record
from tests.synthetic_run import write_run, write_trace

pytest.importorskip("bokeh", reason="the report's charts have an environment of their own: make test-report")

HOSTILE = (
    "</script><script>window.breached = 1</script><img src=x onerror='window.breached = 2'> {{x}} "
    "\u202etxt\u2066 \x00 end"
)
TOKENS = {"texts": ["alike", HOSTILE, "end"], "engine": [-4.0, -0.1, None], "trainer": [-4.0, -0.6, -0.2]}
CONVERSATION = {
    "text": "all of it", "reward": -2.0, "finish_reason": "limit", "num_tokens": 3, "tokens": TOKENS, "turns": [
        {"by": "environment", "text": HOSTILE, "num_tokens": 1},
        {"by": "policy", "text": "<tool_call>add(1, 2)</tool_call> 7", "num_tokens": 1, "reward": 0.25},
        {"by": "policy", "text": "8", "num_tokens": 1, "reward": -1.5, "after": {"turn": 0, "num_tokens": None}},
    ],
}  # fmt: skip
LINE = "one line of a megabyte " * 45_000


def write_configs(*folders):
    for number, folder in enumerate(folders):
        values = {"lr": Value(str(number), f"--lr {number}"), "note": Value(HOSTILE, "--note")}
        run_folder.write_saved_config(folder / "config.json", SavedConfig(num_devices=1, sections={"training": values}))


def page_of(folders, path):
    data = ReportData(folders, peak_tflops=1.0)
    page = build_page(load_library(), data.read(), [data.read_rollouts(run) for run in range(len(data))])
    path.write_text(page, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Open the page of two runs; the second is as hostile as a run can be."""
    path = tmp_path_factory.mktemp("report")
    folders = {"calm": write_run(path / "calm", 40), "</script><b>hostile</b>": write_run(path / "hostile", 40)}
    write_configs(*folders.values())
    write_trace(path / "calm", 40)
    with (path / "hostile" / "samples.jsonl").open("a") as file:
        for text in (HOSTILE, LINE, "\ud83d \u05d0\u05d1"):
            response = {"text": text, "reward": -3.0, "components": {HOSTILE: 1.0}, "tokens": TOKENS}
            record = {"version": 40, "kind": "evaluation", "row": HOSTILE, "prompt": text, "responses": [response]}
            file.write(json.dumps(record) + "\n")
        talk = {"version": 40, "kind": "conversation", "row": "talk", "prompt": "p", "responses": [CONVERSATION] * 2}
        file.write(json.dumps(talk) + "\n")
        file.write("{torn")
    return page_of(folders, path / "report.html")


@pytest.fixture
def opened(browser, page):
    browser.open(page)
    browser.wait("[...shown.values()].filter(chart => chart.isVisible).every(chart => chart.view) && shown.size > 0")
    return browser


def test_the_page_loads_nothing_and_breaks_no_policy(opened, page):
    opened.open_rollouts()
    opened.run("document.getElementById('others-box').open = true")
    opened.show("curves")
    opened.wait("[...shown.values()].filter(chart => chart.isVisible).every(chart => chart.view)")
    asked = opened.requests()
    assert [address for address in asked if not address.startswith(("data:", "blob:"))] == [page.as_uri()]
    assert opened.complaints() == []


def test_every_chart_that_is_seen_is_drawn_with_its_curves(opened):
    count = opened.run("return shown.size")
    assert count > 8
    for number in range(count):
        opened.run("[...shown.keys()][arguments[0]].scrollIntoView()", number)
        opened.wait(
            f"[...shown.values()].filter(chart => !at('others-box').contains(chart.plot))[{number}]?.view ?? true"
        )
    drawn = opened.run("""
        const isWhole = chart => chart.glyphs.every((made, place) => made.length && made.every(
            glyph => glyph.data_source.get_length() === chart.spec.series[place].x.length));
        return [...shown.values()].filter(chart => chart.view && chart.spec).map(isWhole);
    """)
    assert len(drawn) > 8
    assert all(drawn)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_the_page_is_accessible_and_fits(browser, page, scheme, width, height):
    browser.resize(width, height, scheme)
    browser.open(page)
    browser.show("curves")
    browser.wait("[...shown.values()].some(chart => chart.view)")
    browser.open_rollouts()
    browser.show("gantt")
    browser.wait("[...shown.values()].find(chart => chart.iteration)?.view")
    browser.run("at('row').value = 'train.jsonl:3'; find()")
    browser.wait("document.querySelector('#history figure') !== null")
    browser.run("for (const box of document.querySelectorAll('details')) box.open = true")
    assert browser.breaches_of_accessibility() == []
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")


def test_text_of_runs_is_shown_and_never_run(opened):
    opened.open_rollouts()
    opened.run("at('kind').value = 'evaluation'; find()")
    assert opened.run("return window.breached ?? null") is None
    assert opened.run("return document.querySelectorAll('main img, main b, main script').length") == 0
    texts = opened.run("return [...document.querySelectorAll('#groups .responses .text')].map(box => box.textContent)")
    assert texts[0] == HOSTILE.replace("\u202e", "U+202E").replace("\u2066", "U+2066").replace("\x00", "U+0000")
    assert 20_000 <= len(texts[1]) < 20_100
    assert "1,015,000 characters are left out here" in texts[1]
    assert texts[2] == "? \u05d0\u05d1"
    legends = opened.run("return [...document.querySelectorAll('.legend')].map(one => one.textContent).join()")
    assert "</script><b>hostile</b>: " in legends
    assert HOSTILE[:40] in opened.run("return at('values').textContent")


def test_search_and_filters_leave_what_matches(opened):
    opened.open_rollouts()

    def found(**values):
        opened.run("at('filters').reset()")
        opened.run("Object.entries(arguments[0]).forEach(([id, value]) => at(id).value = value)", values)
        opened.run("find()")
        versions = "[...document.querySelectorAll('#groups h3')].map(one => one.textContent.split(' ')[1]).join(' ')"
        return opened.run(f"return [at('found').textContent, {versions}]")

    assert found()[0] == "324 groups of 324"
    inside = found(**{"version-from": "3", "version-to": "4", "of-run": "0"})
    assert inside == ["8 groups of 324", "3 3 3 3 4 4 4 4"]
    assert found(query="MEGABYTE LINE")[0] == "0 groups of 324"
    assert found(query="Line of a Megabyte")[0] == "1 group of 324"
    assert opened.run("return document.querySelector('#groups mark').textContent") == "line of a megabyte"
    assert found(**{"reward-to": "-1"})[0] == "4 groups of 324"
    assert found(row="train.jsonl:3", **{"of-run": "1"})[1] == "0 10 20 30"
    assert found(order="-version")[1].startswith("40 ")


def test_tokens_are_coloured_by_what_was_recorded_of_them(opened):
    opened.open_rollouts()
    spans = "[...document.querySelector('#groups .responses .text').querySelectorAll('span[title]')]"

    def strengths(tint):
        opened.run("at('kind').value = 'evaluation'; at('tint').value = arguments[0]; find()", tint)
        return [
            float(one or 0)
            for one in opened.run(
                f"return {spans}.map(one => /srgb.*\\/ ([0-9.]+)/.exec(getComputedStyle(one).backgroundColor)?.[1])"
            )
        ]

    apart, unlikely = strengths("difference"), strengths("surprise")
    assert apart[0] == 0 < apart[1]
    assert unlikely[0] > unlikely[1] == unlikely[2] == 0
    assert opened.run(f"return {spans}.map(one => one.title)")[1] == "engine -0.1, trainer -0.6, ratio 0.6065"
    assert opened.run("return window.breached ?? null") is None
    opened.run("at('tint').value = ''; find()")
    assert opened.run(f"return {spans}.length") == 0


def test_a_conversation_is_shown_turn_by_turn_and_its_branches_stand_further_in(browser, page):
    browser.resize(390, 844)
    browser.open(page)
    browser.open_rollouts()
    browser.run("at('kind').value = 'conversation'; at('tint').value = 'difference'; find()")
    turns = "[...document.querySelectorAll('#groups .response')[0].querySelectorAll('.turns li')]"
    said = browser.run(f"return {turns}.map(one => [one.className, ...[...one.children].map(part => part.innerText)])")
    assert [turn[:2] for turn in said] == [
        ["environment", "1 environment\n1 token"],
        ["policy", "2 policy\n1 token\nreward 0.25"],
        ["policy", "3 policy\n1 token\nreward -1.5\nbranch, follows turn 1"],
    ]
    assert browser.run("return document.querySelector('#groups .response .bad').textContent") == "ended by a limit"
    # The second turn has the second token, whose log-probs differ.
    tinted = browser.run(
        f"return {turns}.map(one => /srgb/.test(getComputedStyle(one.querySelector('span[title]')).backgroundColor))"
    )
    assert tinted == [False, True, False]
    lefts = browser.run(f"return {turns}.map(one => one.getBoundingClientRect().left)")
    assert lefts[0] == lefts[1] < lefts[2]
    browser.run("at('tint').value = ''; at('query').value = '<TOOL_CALL>'; find()")
    assert browser.run("return document.querySelector('#groups mark').textContent") == "<tool_call>"
    assert browser.run("return window.breached ?? null") is None
    assert browser.breaches_of_accessibility() == []
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")


def test_rollouts_of_one_source_and_the_curves_of_each_are_shown(opened):
    opened.open_rollouts()
    opened.run("at('source').value = 'train.jsonl'; find()")
    assert opened.run("return at('found').textContent") == "320 groups of 324"
    names = ["sources/a/x.jsonl/reward", "sources/b.jsonl/reward", "evaluation/sources/b.jsonl/mean"]
    curves = {name: {"x": [0, 1], "y": [0.0, 1.0]} for name in names}
    made = opened.run(
        "const [charts] = listCharts([{ label: '', curves: arguments[0] }]);"
        "return charts.map(one => [one.title, one.series.map(line => line.label)])",
        curves,
    )
    assert made == [["Reward by source", ["a/x.jsonl", "b.jsonl"]], ["Evaluation by source, mean reward", ["b.jsonl"]]]


def test_one_prompt_is_followed_over_the_versions(opened):
    opened.open_rollouts()
    button = "[...document.querySelectorAll('#groups button')].find(one => one.textContent.startsWith('This prompt'))"
    opened.run(f"{button}.click()")
    opened.wait("[...shown.values()].some(chart => chart.spec?.title.startsWith('Rewards of row') && chart.view)")
    labels = "[...document.querySelectorAll('#groups article')].map(one => one.getAttribute('aria-label'))"
    row = opened.run("return at('row').value")
    assert set(opened.run(f"return {labels}")) == {f"Version {version}, row {row}" for version in (0, 10, 20, 30)}


def test_a_chart_is_read_and_zoomed_with_the_keyboard(opened):
    from selenium.webdriver.common.keys import Keys

    plot = opened.driver.find_element("css selector", "#charts .plot")
    plot.send_keys(Keys.HOME)
    assert opened.run("return at('spoken').textContent").startswith("version 0: calm: mean 0, ")
    plot.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert opened.run("return at('spoken').textContent").startswith("version 2: calm: mean 0.2, ")
    plot.send_keys("+")
    from_to = opened.run("return [view.from, view.to]")
    assert 0 <= from_to[0] < 2 < from_to[1] < 39
    drawn = "[...shown.values()].filter(chart => chart.view && !chart.options.own)"
    ranges = opened.run(f"return {drawn}.map(chart => [chart.model.x_range.start, chart.model.x_range.end])")
    assert ranges == [from_to] * len(ranges)
    plot.send_keys("0")
    assert opened.run("return [view.from, view.to]") == [None, None]


def test_a_chart_says_its_own_values_before_the_browser_has_told_what_is_in_view(opened):
    from selenium.webdriver.common.keys import Keys

    opened.run("watcher.disconnect(); for (const chart of shown.values()) chart.isVisible = undefined")
    opened.driver.find_element("css selector", "#charts .plot").send_keys(Keys.HOME)
    assert opened.run("return at('spoken').textContent").startswith("version 0: calm: mean 0, ")


def test_dragging_zooms_all_charts_and_a_double_click_shows_all(opened):
    from selenium.webdriver.common.action_chains import ActionChains

    plot = opened.driver.find_element("css selector", "#charts .plot")
    ActionChains(opened.driver).move_to_element_with_offset(plot, -60, 0).click_and_hold().move_by_offset(
        100, 10
    ).release().perform()
    opened.wait("view.from !== null")
    start, end = opened.run("return [view.from, view.to]")
    assert 0 < start < end < 39
    ActionChains(opened.driver).move_to_element(plot).double_click().perform()
    opened.wait("view.from === null")


def test_an_iteration_is_read_span_by_span_and_zoomed(opened):
    from selenium.webdriver.common.action_chains import ActionChains

    assert "rank-0" in opened.run("return at('ledger').textContent")
    assert "30.0%" in opened.run("return at('ledger').textContent")
    opened.show("gantt")
    opened.wait("[...shown.values()].find(chart => chart.iteration)?.view")
    gantt = "[...shown.values()].find(chart => chart.iteration)"
    plot = opened.driver.find_element("css selector", "#gantt .plot")
    inside = opened.run(f"const one = {gantt}; return [one.spans.length, one.iteration.version]")
    assert inside == [3, 39]
    # The first of the lanes is at the top, and its first span takes most of the time.
    ActionChains(opened.driver).move_to_element_with_offset(plot, 100, 12 - plot.size["height"] // 2).perform()
    said = "at('gantt').querySelector('p[aria-live]').textContent"
    opened.wait(f"{said}.startsWith('rank-0 main: train · 900 ms')")
    opened.run(f"{gantt}.point(0.12, 1.5)")
    assert opened.run(f"return {said}") == "rank-0 main: wait, number 0 · 50 ms from 0.1 s"
    plot.send_keys("++")
    start, end = opened.run(f"const one = {gantt}; return [one.from, one.to]")
    assert 0 < start < end < 1
    opened.run("at('gantt').querySelector('details').open = true")
    opened.wait("at('gantt').querySelectorAll('tbody tr').length > 0")
    assert "forward, number 0, role policy, 77 tokens" in opened.run("return at('gantt').textContent")


def test_colours_follow_the_system_until_a_person_chooses(browser, page):
    browser.resize(1280, 900, "dark")
    browser.open(page)
    background = "return getComputedStyle(document.body).backgroundColor"
    dark = browser.run(background)
    browser.run("at('theme').value = 'light'; at('theme').onchange()")
    assert browser.run(background) != dark
    browser.resize(1280, 900, "light")
    browser.run("at('theme').value = 'dark'; at('theme').onchange()")
    assert browser.run(background) == dark


def test_a_served_report_follows_its_run(browser, tmp_path):
    folder = write_run(tmp_path / "live", 3)
    with ReportServer(ReportData({"live": folder}), build_page(load_library())) as server:
        thread = threading.Thread(target=server.serve, daemon=True)
        thread.start()
        browser.open(server.address)
        browser.wait("summary.runs.length === 1 && summary.runs[0].num_iterations === 3")
        browser.wait("document.querySelector('#groups article') !== null")
        assert server.token not in browser.run("return location.href")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics_record(3)) + "\n")
        browser.wait("summary.runs[0].num_iterations === 4")
        browser.wait("document.getElementById('newer') !== null")
        asked = {address for address in browser.requests() if not address.startswith("data:")}
        assert asked == {server.origin + path for path in ("/", "/summary", "/rollouts/0")}
        browser.driver.execute_script("sessionStorage.clear()")
        browser.open(server.origin)
        browser.wait("!at('problem').hidden")
        assert "the token is missing or wrong" in browser.run("return at('problem').textContent")
        server.stop()
        thread.join()


@pytest.mark.parametrize(("ends", "disposition"), [("Ctrl-C", signal.SIG_DFL), ("kill", signal.SIG_IGN)])
def test_serving_ends_as_it_says_also_where_ctrl_c_is_ignored(tmp_path, ends, disposition):
    folder = write_run(tmp_path / "live", 3)
    command = [sys.executable, "-m", "megatron_rl.cli", "report", str(folder), "--serve"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, disposition)
    )
    assert process.stdout.readline().startswith("open http://127.0.0.1:")
    process.send_signal(signal.SIGINT)
    if ends == "kill":
        assert process.stdout.readline() == f"kill {process.pid} ends it\n"
        process.terminate()
    assert process.wait(60) == (ExitCode.OK if ends == "Ctrl-C" else -signal.SIGTERM)
    process.stdout.close()
