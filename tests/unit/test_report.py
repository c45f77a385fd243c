"""The page about runs: its contents, that text of runs stays text in it, and the server of a page that follows runs."""

import base64
import gzip
import html.parser
import itertools
import json
import random
import re
import socket
import sys
import threading

import httpx
import msgspec
import pytest

from megatron_rl import cli
from megatron_rl.analysis import commands as command
from megatron_rl.analysis.report import curves, page, rollouts
from megatron_rl.analysis.report.data import ReportData, RunFiles
from megatron_rl.analysis.report.page import build_page
from megatron_rl.analysis.report.rollouts import SampleFile
from megatron_rl.analysis.report.server import ReportServer
from megatron_rl.errors import ExitCode, UsageError
from megatron_rl.observe import run_folder
from megatron_rl.observe.run_folder import DriftFindings, SavedConfig, Side, Value, write_findings
from megatron_rl.shared.weights.mapping import ModelSize
from tests.observed import metrics_record, write_metrics
from tests.synthetic_run import write_run, write_samples

LIBRARY = "window.Bokeh = {};"
HOSTILE = "</script><script>alert(1)</script><!-- <script> \u2028 \u202e \x00 \ud83d & <img src=x onerror=alert(2)>"


@pytest.fixture
def without_bokeh(monkeypatch):
    monkeypatch.setattr(command, "load_library", lambda: LIBRARY)


class Elements(html.parser.HTMLParser):
    """The elements of a page, and the contents of its script elements."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self._inside = [], {}, None
        self.policy = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        given = dict(attrs)
        self._inside = given.get("id", "main") if tag == "script" else None
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"]

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        if self._inside is not None:
            self.scripts[self._inside] = data

    def unpacked(self, name):
        return json.loads(gzip.decompress(base64.b64decode(self.scripts[name])))


# Curves


def test_every_number_is_a_curve_and_a_run_without_evaluations_has_none_of_them():
    records = [metrics_record(version) for version in (1, 3)]
    found = curves.collect_curves(records)
    assert found["reward/mean"] == {"x": [1, 3], "y": [0.1, 0.3]}
    assert "time/generated_tokens_per_second" in found
    assert not [name for name in found if name.startswith("evaluation") or name == "time/wait"]
    assert curves.collect_curves([{"version": 7, "evaluation": {"mean": 0.5}}]) == {
        "evaluation/mean": {"x": [7], "y": [0.5]}
    }


def test_a_long_curve_keeps_its_ends_and_every_peak():
    xs = list(range(100_000))
    ys = [0.0] * len(xs)
    ys[12_345], ys[77_777] = 5.0, -5.0
    thin_x, thin_y = curves.thin(xs, ys)
    assert len(thin_x) <= curves.MOST_POINTS
    assert thin_x == sorted(thin_x)
    assert (thin_x[0], thin_x[-1]) == (0, 99_999)
    assert dict(zip(thin_x, thin_y, strict=True)).items() >= {(12_345, 5.0), (77_777, -5.0)}
    assert curves.thin(xs[:2000], ys[:2000]) == (xs[:2000], ys[:2000])


def test_bars_of_neighbouring_iterations_keep_the_whole_time():
    records = [metrics_record(version, seconds=version % 7) for version in range(1001)]
    times = curves.collect_times(records, most=100)
    assert len(times["first"]) == len(times["last"]) == 91
    whole = sum(num * mean for num, mean in zip(times["num"], times["seconds"]["train"], strict=True))
    assert whole == pytest.approx(sum(record["time"]["train"] for record in records), rel=1e-5)
    assert curves.collect_times([{"version": 0}])["first"] == []


def test_operations_are_those_of_parameters_and_of_what_each_token_sees():
    record = {
        "version": 0,
        "groups": 2,
        "tokens": {"prompt": 20, "response": 80},
        "responses": {"count": 8},
        "time": {"iteration": 2.0, "trained_tokens_per_second": 50.0, "generated_tokens_per_second": 40.0},
    }
    size = ModelSize(num_parameters=1200, num_multiplied=1000, attention_width=64)
    seen_by_prompts = 20 * 10 / 2
    seen_by_responses = 80 * (10 + 10 / 2)
    flops = 6 * 1000 * 100 + 12 * 64 * (seen_by_prompts + seen_by_responses)
    assert curves.count_flops(record, size) == flops
    found = curves.derive_throughput([record], 4, 2, size, peak=1e6)
    assert found["per_device/model_flops_utilisation"]["y"] == [pytest.approx(flops / (2.0 * 4 * 1e6), rel=1e-5)]
    assert found["per_device/trained_tokens_per_second"]["y"] == [12.5]
    assert found["per_device/generated_tokens_per_second"]["y"] == [20.0]
    assert curves.derive_throughput([record], None, None, size, 1e6) == {}
    assert list(curves.derive_throughput([record], 4, None, size, None)) == ["per_device/trained_tokens_per_second"]


# Rollouts


def choose(path, most_bytes=rollouts.MOST_BYTES):
    file = SampleFile(path)
    file.update()
    return file.choose(most_bytes)


def test_a_choice_has_groups_of_every_version_and_the_same_rows_wherever_they_recur(tmp_path):
    path = tmp_path / "samples.jsonl"
    write_samples(path, num_versions=50, groups_per_version=8, group_size=2)
    whole = choose(path)
    assert len(whole["groups"]) == whole["num_groups"] == 400
    room = path.stat().st_size // 3
    few = choose(path, room)["groups"]
    assert sum(len(json.dumps(group)) for group in few) <= room
    by_version = {version: {group["row"] for group in few if group["version"] == version} for version in range(50)}
    counts = {len(rows) for rows in by_version.values()}
    assert counts <= {2, 3}
    for version in range(10):
        same = [by_version[later] for later in range(version, 50, 10)]
        assert len(set.intersection(*same)) >= 2
    assert few == choose(path, room)["groups"]
    first = [group["version"] for group in choose(path, room // 20)["groups"]]
    assert max(b - a for a, b in itertools.pairwise(first)) <= 16


def test_a_file_that_grows_is_read_on_and_one_that_a_resumed_run_cut_is_read_again(tmp_path):
    path = tmp_path / "samples.jsonl"
    file = SampleFile(path)
    file.update()
    assert file.choose()["groups"] == []
    write_samples(path, 2, 1, 1)
    with path.open("ab") as end:
        end.write(b'{"version": 2, "row": "to')
    file.update()
    assert [group["version"] for group in file.choose()["groups"]] == [0, 1]
    with path.open("ab") as end:
        end.write(b'rn", "prompt": "", "responses": []}\n')
    file.update()
    assert [group["row"] for group in file.choose()["groups"]][2:] == ["torn"]
    path.write_text('{"version": 5, "row": "a", "prompt": "new", "responses": []}\n' * 20)
    file.update()
    assert [group["prompt"] for group in file.choose()["groups"]] == ["new"] * 20


def test_lines_that_are_not_samples_are_counted_and_broken_letters_are_replaced(tmp_path):
    path = tmp_path / "samples.jsonl"
    good = {"version": 0, "row": "r", "prompt": "p", "responses": [{"text": "t", "reward": 1.0}]}
    lines = [
        json.dumps(good).encode().replace(b'"t"', b'"\xff\xfe"'),
        json.dumps({**good, "prompt": "\ud83d"}).encode(),
        b"[1, 2]",
        b"{",
        b"\x00\x00",
        json.dumps({**good, "version": "new"}).encode(),
        json.dumps({**good, "responses": 3, "prompt": None}).encode(),
        json.dumps(good).encode(),
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    found = choose(path)
    assert found["num_unreadable"] == 4
    assert [group["prompt"] for group in found["groups"]] == ["p", "\ud83d", "null", "p"]
    assert found["groups"][0]["responses"][0]["text"] == "\ufffd\ufffd"
    assert found["groups"][2]["responses"] == []


def test_a_page_whose_texts_do_not_compress_stays_below_twenty_megabytes(tmp_path):
    path = tmp_path / "samples.jsonl"
    draw = random.Random(0)
    with path.open("w") as file:
        for version in range(1500):
            response = {"text": base64.b85encode(draw.randbytes(8000)).decode(), "reward": 0.5}
            line = {"version": version, "kind": "training", "row": "r", "prompt": "", "responses": [response]}
            file.write(json.dumps(line) + "\n")
    chosen = choose(path)
    assert 500 < len(chosen["groups"]) < chosen["num_groups"] == 1500
    # Bokeh's scripts take half a megabyte.
    assert len(page.build_page(LIBRARY, {"runs": []}, [chosen])) < 19_000_000


def test_a_text_of_a_megabyte_loses_its_middle():
    short = rollouts.shorten("a" * 500_000 + "b" * 500_000)
    assert len(short) < rollouts.MOST_CHARACTERS + 100
    assert short.startswith("aaa")
    assert short.endswith("bbb")
    assert "980,000 characters are left out here" in short


def test_tokens_that_do_not_fit_their_log_probs_are_left_out(tmp_path):
    path = tmp_path / "samples.jsonl"
    whole = {"texts": ["a", "b"], "engine": [-1.0, None], "trainer": None}
    given = [
        whole,
        {**whole, "engine": [-1.0]},
        {**whole, "texts": [1, 2]},
        "tokens",
        None,
        {**whole, "trainer": [0.0]},
    ]
    many = {"texts": ["x"] * 6000, "engine": [0.0] * 6000, "trainer": [0.5] * 6000}
    line = {"version": 0, "responses": [{"text": "ab", "tokens": tokens} for tokens in (*given, many)]}
    path.write_text(json.dumps(line) + "\n")
    (group,) = choose(path)["groups"]
    assert ["tokens" in response for response in group["responses"]] == [True, *[False] * 5, True]
    assert group["responses"][0]["tokens"] == {"texts": ["a", "b"], "engine": [-1.0, None], "num_left_out": 0}
    kept = group["responses"][-1]["tokens"]
    assert len(kept["texts"]) == len(kept["engine"]) == len(kept["trainer"]) == 6000 - kept["num_left_out"] == 5000


# The page


def test_text_of_runs_ends_no_element_and_comes_back_as_it_was(tmp_path):
    samples = [{"groups": [{"prompt": HOSTILE, "responses": [{"text": HOSTILE}]}]}]
    found = Elements(page.build_page(LIBRARY, {"runs": [{"label": HOSTILE}]}, samples))
    plain = Elements(page.build_page(LIBRARY, {"runs": [{"label": ""}]}, [{"groups": []}]))
    assert found.tags == plain.tags
    assert found.unpacked("summary")["runs"][0]["label"] == HOSTILE.replace("\ud83d", "?")
    assert found.unpacked("rollouts-0")["groups"][0]["prompt"] == HOSTILE.replace("\ud83d", "?")
    assert not set(page.write_json(HOSTILE)) & set("<>&\u2028\u2029")


def test_only_the_pages_own_scripts_may_run_and_nothing_is_loaded():
    text = page.build_page(LIBRARY, {"runs": []}, [])
    found = Elements(text)
    directives = dict(part.strip().split(" ", 1) for part in found.policy.split(";"))
    assert directives["default-src"] == directives["connect-src"] == "'none'"
    assert directives["script-src"].split() == [page._hash(found.scripts["main"]), page._hash(LIBRARY)]
    served = Elements(page.build_page(LIBRARY))
    assert "connect-src 'self'" in served.policy
    assert "summary" not in served.scripts
    assert not re.search(r"""(src|href)\s*=\s*["']?(?!#|data:)[a-z/]""", text)


def test_the_pages_script_makes_elements_and_texts_only():
    whole = "".join(page.read_part(name) for name in page.PARTS)
    for risky in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
        assert risky not in whole


def test_a_run_of_metrics_alone_has_a_report(tmp_path, without_bokeh, capsys):
    write_metrics(tmp_path / "run" / "metrics.jsonl", range(3))
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"version": 3, "rew')
    out = tmp_path / "report.html"
    assert cli.main(["report", str(tmp_path / "run"), "--out", str(out)]) == ExitCode.OK
    found = Elements(out.read_text(encoding="utf-8"))
    (run,) = found.unpacked("summary")["runs"]
    assert (run["label"], run["num_iterations"]) == ("run", 3)
    assert run["audit"] is run["given"] is None
    assert found.unpacked("rollouts-0") == {"groups": [], "num_groups": 0, "num_unreadable": 0}


def test_several_runs_share_the_room_and_are_compared_by_their_configurations(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_rl.analysis.report.data.MOST_BYTES", 40_000)
    folders = {name: write_run(tmp_path / name, num_versions=20) for name in ("a", "b")}
    for name, folder in folders.items():
        values = {"lr": Value(name, "--lr"), "seed": Value("1", "default")}
        run_folder.write_saved_config(folder / "config.json", SavedConfig(num_devices=2, sections={"training": values}))
    data = ReportData(folders)
    summary = data.read()
    assert summary["differences"] == [("training", "lr", ["a", "b"])]
    assert [run["given"] for run in summary["runs"]] == [[("training", "lr", name, "--lr")] for name in ("a", "b")]
    assert "per_device/trained_tokens_per_second" in summary["runs"][0]["curves"]
    samples = [data.read_rollouts(run) for run in range(len(data))]
    assert [0 < len(json.dumps(of_run["groups"])) < 20_000 for of_run in samples] == [True, True]


def test_the_verdict_of_the_audit_is_in_the_report_and_a_live_log_is_not_checked_each_time(tmp_path, monkeypatch):
    write_metrics(tmp_path / "metrics.jsonl", range(1))
    (tmp_path / "audit.jsonl").write_text("nonsense\n")
    now = [0.0]

    def clock():
        now[0] += 1.0
        return now[0]

    run = RunFiles("run", tmp_path, clock)
    first = run.read(None, None)["audit"]
    assert first["num_breaches"] == 1
    assert first["breaches"][0][0] == "line 1"
    with (tmp_path / "audit.jsonl").open("a") as file:
        file.write("nonsense\n")
    assert run.read(None, None)["audit"] == first
    now[0] += 1000.0
    assert run.read(None, None)["audit"]["num_breaches"] == 2


def test_the_findings_of_drift_are_in_the_report(tmp_path):
    write_metrics(tmp_path / "metrics.jsonl", range(1))
    run = RunFiles("run", tmp_path)
    before = run.signature()
    assert run.read(None, None)["drift"] is None
    side = Side(name="engine", dtype="float32", difference=1e-7, largest="logits", causes=["logits: why"])
    write_findings(tmp_path, DriftFindings(checkpoint="folder", num_tokens=3, sides=[side]))
    assert run.signature() != before
    assert run.read(None, None)["drift"]["sides"] == [msgspec.to_builtins(side)]
    (tmp_path / "drift.json").write_text("nonsense")
    assert "drift.json cannot be read" in run.read(None, None)["drift"]["problem"]


@pytest.mark.parametrize(("words", "problem"), [
    ([], "--out is missing: write --out FILE.html, or --serve"),
    (["--out", "report.pdf"], "a report ends with .html"),
    (["--out", "a.html", "--peak-tflops", "nan"], "--peak-tflops nan must be finite and above 0"),
    (["--serve", "70000"], "--serve 70000 must be a port from 0 to 65535"),
])  # fmt: skip
def test_a_mistake_in_the_command_is_named(tmp_path, capsys, words, problem):
    write_metrics(tmp_path / "metrics.jsonl", range(1))
    assert cli.main(["report", str(tmp_path), *words]) == ExitCode.USAGE
    assert problem in capsys.readouterr().err


def test_a_report_without_bokeh_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "bokeh.resources", None)
    write_metrics(tmp_path / "metrics.jsonl", range(1))
    assert cli.main(["report", str(tmp_path), "--out", str(tmp_path / "a.html")]) == ExitCode.ENVIRONMENT
    assert "pip install bokeh" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path, capsys, without_bokeh):
    write_metrics(tmp_path / "metrics.jsonl", range(1))
    (tmp_path / "file").write_text("")
    assert cli.main(["report", str(tmp_path), "--out", str(tmp_path / "file" / "a.html")]) == ExitCode.INPUT
    assert "cannot be written" in capsys.readouterr().err


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "run", num_versions=3)


@pytest.fixture
def server(folder):
    with ReportServer(ReportData({"run of nobody": folder}), build_page("window.Bokeh = {};")) as made:
        thread = threading.Thread(target=made.serve, daemon=True)
        thread.start()
        yield made
        made.stop()
        thread.join()


def ask(server, path, token=None, **headers):
    authorization = {} if token is None else {"authorization": f"Bearer {token}"}
    return httpx.get(server.origin + path, headers={**authorization, **headers})


def test_the_page_is_open_and_holds_nothing_of_the_runs(server):
    answer = ask(server, "/")
    assert answer.status_code == 200
    assert "run of nobody" not in answer.text
    assert server.token not in answer.text
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("path", ["/summary", "/rollouts/0", "/nothing"])
def test_data_wants_the_token(server, path):
    for given in (None, "wrong", server.token[:-1], server.token + "x"):
        assert ask(server, path, given).status_code == 401
    assert ask(server, path, server.token).status_code == (404 if path == "/nothing" else 200)


def test_another_name_that_leads_to_this_machine_is_refused(server):
    assert ask(server, "/summary", server.token, host="elsewhere.example").status_code == 421
    assert ask(server, "/", host=f"localhost.example:{server.origin.rpartition(':')[2]}").status_code == 421


def test_the_server_listens_on_loopback_and_its_token_is_in_the_fragment_alone(server):
    assert server.origin.startswith("http://127.0.0.1:")
    before, _, fragment = server.address.partition("#")
    assert fragment == f"token={server.token}"
    assert server.token not in before


def test_a_summary_is_sent_again_only_when_a_file_has_grown(server, folder):
    first = ask(server, "/summary", server.token)
    tag = first.headers["etag"]
    assert first.json()["runs"][0]["num_iterations"] == 3
    assert ask(server, "/summary", server.token, **{"if-none-match": tag}).status_code == 304
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics_record(3)) + "\n")
    second = ask(server, "/summary", server.token, **{"if-none-match": tag})
    assert second.status_code == 200
    assert second.json()["runs"][0]["num_iterations"] == 4
    assert second.headers["etag"] != tag


def test_rollouts_come_by_the_number_of_their_run(server):
    assert ask(server, "/rollouts/0", server.token).json()["num_groups"] == 12
    for path in ("/rollouts/1", "/rollouts/-1", "/rollouts/x", "/rollouts/"):
        assert ask(server, path, server.token).status_code == 404


def test_a_run_that_cannot_be_read_is_reported_and_the_server_continues(server, folder):
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text("nonsense\n")
    answer = ask(server, "/summary", server.token)
    assert answer.status_code == 503
    assert "line 1" in answer.json()["error"]
    (folder / "metrics.jsonl").write_text(text)
    assert ask(server, "/summary", server.token).status_code == 200


def test_a_port_that_is_taken_is_named(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"--serve {port} cannot be opened"):
            ReportServer(ReportData({"run": folder}), "", port)
