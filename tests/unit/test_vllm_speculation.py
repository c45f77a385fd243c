"""Drafts in engines: the flag of vLLM's, its mistakes, and the counts of what was accepted."""

import asyncio
import importlib.util
import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.shared.protocol.wire import Drafts
from megatron_rl.sidecar.vllm.checks import find_invariance_problems
from megatron_rl.sidecar.vllm.connection import DraftMeter, count_drafts
from megatron_rl.sidecar.vllm.flags import FLAGS_OF_DRAFTS, drop_flags, find_problems_of_replay, split_flags
from megatron_rl.sidecar.vllm.speculation import PACKAGE, describe_for_vllm, find_draft_problems
from tests.ranks import ROOT

METRICS = """# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
vllm:spec_decode_num_drafts_total{engine="0",model_name="policy"} 5.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="policy"} 20.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="policy"} 4.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="policy"} 7.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 6.0
"""


def test_drafts_are_given_to_vllm_with_its_rule_that_keeps_the_policys_distribution(tmp_path):
    assert describe_for_vllm(RolloutConfig()) is None
    for text, tokens, expected in (
        ("ngram", 3, ("ngram", 3, None)),
        ("suffix", None, ("suffix", 24, None)),
        (f"draft:{tmp_path}", None, ("draft_model", 4, str(tmp_path))),
        (f"eagle3:{tmp_path}", 2, ("eagle3", 2, str(tmp_path))),
        ("mtp", None, ("mtp", 1, None)),
    ):
        given = json.loads(describe_for_vllm(RolloutConfig(speculative=text, speculative_tokens=tokens)) or "")
        assert (given["method"], given["num_speculative_tokens"], given.get("model")) == expected
        assert given["rejection_sample_method"] == "standard"


# Flags of vLLM that draft, as a user may write them, each with the name that is said.
OWN_DRAFTS = {
    "--speculative-config.method ngram": "--speculative-config",
    "--speculative_conf='{}'": "--speculative-config",
    "-sc '{}'": "-sc",
    "'-sc'={}": "-sc",
    "-s '{}'": "-sc",
    "--spec-method ngram": "--spec-method",
    "--spec-mod DIR": "--spec-model",
    "--spec_tokens=3": "--spec-tokens",
}


@pytest.mark.parametrize(("words", "name"), OWN_DRAFTS.items())
def test_replay_and_invariance_refuse_drafts_however_they_are_written(words, name):
    (found,) = find_problems_of_replay(words)
    assert found.startswith(f"--rollout-vllm-args: with {name}, which experts")
    (found,) = find_invariance_problems(RolloutConfig(is_batch_invariant=True, vllm_args=words), "cpu")
    assert f"--rollout-vllm-args with {name} cannot be given together" in found
    assert drop_flags(split_flags(f"--seed 3 {words} -q fp8"), *FLAGS_OF_DRAFTS) == ("--seed", "3", "-q", "fp8")


def test_mistakes_in_drafts_are_found_before_an_engine_starts():
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({}, []),
        ({"speculative": "ngram"}, []),
        ({"speculative_tokens": 3}, ["--rollout-speculative-tokens 3 needs --rollout-speculative"]),
        ({"speculative": "ngram", "replay_routing": True}, ["--rollout-replay-routing"]),
        ({"speculative": "ngram", "lora_rank": 8}, ["--rollout-lora-rank"]),
        ({"speculative": "ngram", "colocate": "share"}, ["--rollout-colocate"]),
        *(
            ({"speculative": "ngram", "vllm_args": words}, [f"--rollout-vllm-args with {name}"])
            for words, name in OWN_DRAFTS.items()
        ),
        *(
            ({"lora_rank": 8, "vllm_args": words}, [f"--rollout-vllm-args with {name} and --rollout-lora-rank"])
            for words, name in OWN_DRAFTS.items()
        ),
        *(
            ({"speculative": text}, ["must be one of ngram, suffix, draft:DIR, eagle3:DIR, mtp"])
            for text in ("medusa", "draft", "draft:", "eagle3", "ngram:folder", "mtp:", "")
        ),
    ]
    for values, expected in cases:
        found = list(find_draft_problems(RolloutConfig(**values)))
        assert len(found) == len(expected), (values, found)
        assert all(text in problem for text, problem in zip(expected, found, strict=True)), found


def make_folder(path: Path, has_weights: bool = True, **config: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    if has_weights:
        (path / "model.safetensors").touch()
    return path


def test_a_model_that_cannot_draft_for_the_policy_is_found_before_an_engine_starts(tmp_path):
    policy = make_folder(tmp_path / "policy", vocab_size=512)
    with_layers = make_folder(tmp_path / "layers", num_nextn_predict_layers=1)
    with_images = make_folder(tmp_path / "images", text_config={"vocab_size": 512, "mtp_num_hidden_layers": 1})
    small = make_folder(tmp_path / "small", vocab_size=512, architectures=["Qwen3ForCausalLM"])
    head = make_folder(tmp_path / "head", vocab_size=512, architectures=["LlamaForCausalLMEagle3"])
    unnamed = make_folder(tmp_path / "unnamed", vocab_size=512, draft_vocab_size=64, has_weights=False)
    (unnamed / "pytorch_model.bin").touch()
    wide = make_folder(tmp_path / "wide", vocab_size=640)
    empty = make_folder(tmp_path / "empty", has_weights=False, vocab_size=512)
    for model, text, expected in (
        (policy, f"draft:{small}", ""),
        (with_images, f"draft:{small}", ""),
        (policy, f"eagle3:{head}", ""),
        (with_layers, "mtp", ""),
        (with_images, "mtp", ""),
        (None, "mtp", ""),
        (policy, "mtp", "has no prediction layers"),
        (policy, f"draft:{head}", f"write eagle3:{head}"),
        (policy, f"draft:{unnamed}", f"write eagle3:{unnamed}"),
        (policy, f"eagle3:{unnamed}", ""),
        (policy, f"draft:{wide}", "has 640 tokens (vocab_size), and the policy has 512"),
        (with_images, f"draft:{wide}", "has 640 tokens (vocab_size), and the policy has 512"),
        (policy, f"draft:{empty}", "must be a Hugging Face folder"),
        (policy, f"draft:{tmp_path}", "must be a Hugging Face folder"),
    ):
        found = list(find_draft_problems(RolloutConfig(speculative=text), model))
        assert len(found) == bool(expected), (text, found)
        assert all(expected in one for one in found), (text, found)

    for folder, first in ((policy, "a"), (small, "b")):
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {first: 0, "c": 1}}}))
    (found,) = find_draft_problems(RolloutConfig(speculative=f"draft:{small}"), policy)
    assert "gives tokens other numbers" in found
    (small / "tokenizer.json").write_text((policy / "tokenizer.json").read_text())
    assert not list(find_draft_problems(RolloutConfig(speculative=f"draft:{small}"), policy))


def test_suffix_drafts_need_their_package_in_the_engines_environment(tmp_path, monkeypatch):
    def find(python: Path | None, num_engines: int = 1) -> list[str]:
        return list(find_draft_problems(RolloutConfig(speculative="suffix", python=python, num_engines=num_engines)))

    for spec, num_problems in ((None, 1), (object(), 0)):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, spec=spec: spec)
        found = find(None)
        assert len(found) == num_problems
        assert all(f"{sys.executable} -m pip install {PACKAGE}" in one for one in found)
        # Engines on other hosts alone.
        assert not find(None, num_engines=0)

    # Another interpreter is asked itself, whatever is installed here, and has none of this one's PYTHONPATH.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "engines"], check=True)
    python = tmp_path / "engines" / "bin" / "python"
    paths = {"base": str(tmp_path / "engines"), "platbase": str(tmp_path / "engines")}
    (tmp_path / "here" / "arctic_inference").mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "here"))
    (found_there,) = find(python)
    assert f"{python} -m pip install {PACKAGE}" in found_there
    Path(sysconfig.get_path("purelib", vars=paths), "arctic_inference").mkdir()
    assert not find(python)
    # Another mistake, which has an error of its own.
    assert not find(tmp_path / "missing")


def test_suffix_drafts_come_from_the_release_that_vllm_names():
    # Not imported: that takes seconds.
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    assert PACKAGE in (Path(spec.origin).parent / "config" / "speculative.py").read_text()
    assert f"\n{PACKAGE}\n" in (ROOT / "requirements" / "suffix.lock").read_text()


def test_drafts_are_counted_in_the_metrics_of_an_engine_for_each_version():
    assert count_drafts(METRICS) == Drafts(count=5, drafted=24, accepted=7)
    assert count_drafts("") == Drafts()
    later = METRICS.replace(" 5.0", " 6.0").replace(" 7.0", " 9.0").replace(" 4.0", " 8.0")
    answers: list[str | None] = ["", METRICS, None, METRICS, later, later, later]

    async def read_metrics() -> str | None:
        return answers.pop(0)

    async def run() -> list[Drafts | None]:
        connection: Any = SimpleNamespace(read_metrics=read_metrics)
        meter = DraftMeter("engine-0", connection)
        found = [await meter.count(), await meter.count(), await meter.count()]
        await meter.end_version(0)
        found.append(await meter.count())
        await meter.end_version(1)
        return [*found, await meter.count()]

    expected = [Drafts(), count_drafts(METRICS), None, Drafts(count=1, drafted=4, accepted=2), Drafts()]
    assert asyncio.run(run()) == expected


@pytest.mark.each_change
def test_vllms_rule_of_acceptance_samples_with_the_exact_probabilities_of_the_policy():
    """Run a program of its own, because it changes vLLM's kernels."""
    words = [sys.executable, "-m", "tests.sidecar.acceptance"]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["patch"] == "applied"
    assert min(found["num"]) > 1000
    # 11 degrees of freedom: once in a million with right probabilities.
    assert max(found["chi_squared"]) < 49
