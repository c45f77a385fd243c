"""The server of a report that follows runs: who may read, and the changes when a run continues."""

import json
import socket
import threading

import httpx
import pytest

from megatron_rl.analysis.report.data import ReportData
from megatron_rl.analysis.report.page import build_page
from megatron_rl.analysis.report.server import ReportServer
from megatron_rl.errors import UsageError
from tests.observed import metrics_record
from tests.synthetic_run import write_run


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
