"""The notebook of the API, run as it is, and what a user sees when something is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl import api
from megatron_rl.errors import ExitCode, UsageError
from tests.processes import ROOT

pytest.importorskip("tinker", reason="Tinker's SDK has an environment of its own: make test-tinker")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore::FutureWarning")]


def test_the_notebook_trains_and_serves(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    for cell in json.loads((ROOT / "examples" / "loop.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    run = names["run"]
    rows = run.metrics()
    assert [row["version"] for row in rows] == [0, 1, 2]
    assert [row["outcome"] for row in names["audited"]] == ["complete"] * 3
    # A row for each token that was trained on, with its version's fingerprint.
    assert len(names["tokens"]) == rows[2]["tokens/response"]
    assert {row["fingerprint"] for row in names["tokens"]} == {names["audited"][2]["fingerprint"]}
    assert {"prompt", "text", "reward", "version"} <= names["sampled"][0].keys()
    assert 1 <= len(names["one"]["tokens"]) == len(names["one"]["log_probs"])
    assert names["scored"][0]["log_prob"] is None
    assert names["better"][-1]["log_prob"] > names["scored"][-1]["log_prob"]
    # The service's folder has its audit and what was sampled, all from proved weights.
    capsys.readouterr()
    from megatron_rl.commands import audit

    folder = names["folder"] / "service"
    assert audit.main([str(folder)]) == ExitCode.OK
    # Scoring a text samples a token after it.
    assert "3 sequences of clients, 3 from proved weights" in capsys.readouterr().out
    claim_another_version(folder / "sequences.bin")
    assert audit.main([str(folder)]) == ExitCode.RUN
    assert "had not proved to hold it" in capsys.readouterr().out


def claim_another_version(path: Path) -> None:
    from msgspec import msgpack, structs

    from megatron_rl.tinker.provenance import read_sequences

    (first, *others), _ = read_sequences(path.parent)
    encoded = [msgpack.encode(one) for one in (structs.replace(first, version=7), *others)]
    path.write_bytes(b"".join(len(one).to_bytes(4, "little") + one for one in encoded))


def test_what_is_wrong_is_said_as_on_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--rollout-folder is missing"):
        api.train("--hf-model", str(tmp_path))
    with pytest.raises(api.ProcessFailed, match=r"exit code 2; .*(?s:.)*--prompts"):
        api.train("--hf-model", str(tmp_path), "--rollout-folder", str(tmp_path / "run"))
    with (
        pytest.raises(api.ProcessFailed, match="no-such-flag"),
        api.serve("--hf-model", str(tmp_path), "--no-such-flag", "--rollout-folder", str(tmp_path / "served")),
    ):
        pass
    with pytest.raises(UsageError, match="no audit"):
        api.Run(tmp_path)
