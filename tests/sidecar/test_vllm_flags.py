"""Flags of vLLM that a user adds, against the parser of the installed vLLM."""

import asyncio
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megatron_rl.config.settings import RewardConfig, RolloutConfig
from megatron_rl.errors import UsageError
from megatron_rl.sidecar.settings import SidecarSettings, write_message
from megatron_rl.sidecar.vllm.flags import (
    _PARSERS,
    _SET,
    _UTILITIES,
    FLAGS_OF_DRAFTS,
    _find_taken,
    _import_first,
    check_with_vllm,
    find_problems,
)
from megatron_rl.sidecar.vllm.server import link_package
from tests import hf_models
from tests.ranks import ROOT

pytestmark = pytest.mark.each_change


LOSSY = "rejection_sample_method synthetic samples other tokens"


def test_vllm_itself_is_asked_about_its_flags_before_an_engine_starts(tmp_path: Path) -> None:
    packages = link_package(tmp_path)
    asyncio.run(check_with_vllm(sys.executable, ("--kv-cache-dtype", "auto", "--max_num_batched_tokens=128"), packages))
    with pytest.raises(UsageError, match=r"--rollout-vllm-args: --host is not free: drop it"):
        asyncio.run(check_with_vllm(sys.executable, ("--kv-cache-dtype", "auto", "--hos", "0.0.0.0"), packages))


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--no-such-flag", "vLLM refuses it: .*--no-such-flag"),
        pytest.param("--hos 0.0.0.0", "--host is not free: drop it", marks=pytest.mark.slow),
    ],
)
def test_a_mistake_in_the_flags_is_said_though_an_engine_that_starts_meanwhile_may_die_of_it(
    flag: str, said: str, tmp_path: Path
) -> None:
    model, run = hf_models.draw("qwen3", tmp_path / "model"), tmp_path / "run"
    # Read without the checks that need no vLLM, so that its parser is asked about both.
    settings = SidecarSettings(
        platform="cpu",
        hf_model=model,
        seq_length=64,
        rollout=RolloutConfig(folder=run, engine="vllm", vllm_args=flag),
        reward=RewardConfig(functions=["length:8"]),
    )
    write_message(tmp_path / "sidecar.json", settings)
    ended = subprocess.run(
        [sys.executable, "-m", "megatron_rl.sidecar", "--settings", str(tmp_path / "sidecar.json")],
        capture_output=True, text=True, timeout=600, cwd=ROOT, check=False,
    )  # fmt: skip
    assert re.match(f"megatron_rl.sidecar: --rollout-vllm-args: {said}", ended.stderr.splitlines()[-1]), ended.stderr
    assert ended.returncode == 2
    assert "serving" not in ended.stderr
    assert (run / "logs" / "engine-0.log").exists(), "an engine was started beside the parser"
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(model) in " ".join(p.info["cmdline"] or [])]


def test_vllms_own_parser_finds_flags_that_are_not_free_however_they_are_written() -> None:
    arguments, utilities = (_import_first(names) for names in (_PARSERS, _UTILITIES))
    assert arguments is not None
    assert utilities is not None
    parser = arguments.make_arg_parser(utilities.FlexibleArgumentParser())
    speculation = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    for words, *expected in (
        ("--hos 0.0.0.0", "--host is not free"),
        ("--load-for dummy", "--load-format is not free"),
        # A flag's default value replaces ours all the same.
        ("--logprobs-mod raw_logprobs", "--logprobs-mode is not free"),
        ("--middlewar a.b", "--middleware is not free"),
        ("--no-skip-tokenizer-init -tp 2", "-tp is set", "--skip-tokenizer-init is not free"),
        ("--speculative-config.rejection_sample_method synthetic", LOSSY),
        ("--speculative_conf.rejection_sample_method=synthetic", LOSSY),
        (f"--speculative-config {json.dumps({**speculation, 'rejection_sample_method': 'synthetic'})!r}", LOSSY),
        (f"--speculative-config {json.dumps({**speculation, 'rejection_sample_method': 'block'})!r}",),
        # vLLM reads dashes in a key as underscores.
        (f"-sc {json.dumps({**speculation, 'rejection-sample-method': 'synthetic'})!r}", LOSSY),
        ("--speculative-config.rejection-sample-method synthetic", LOSSY),
        ("-s.synthetic-acceptance-length=4", "synthetic_acceptance_length 4 samples other tokens"),
        (f"--speculative-config {json.dumps({**speculation, 'rejection-sample-method': 'block'})!r}",),
        ("--kv-cache-dtype auto --max_num_batched_tokens=128 --uvicorn-log-level info",),
    ):
        found = list(_find_taken(parser, shlex.split(words)))
        assert len(found) == len(expected), (words, found)
        assert all(any(text in problem for problem in found) for text in expected), (words, found)
    assert {name for name in parser._option_string_actions if name.startswith(("--spec-", "--speculative", "-s"))} == {
        *FLAGS_OF_DRAFTS
    }, "a further flag drafts tokens"
    # No free flag is the beginning of one that is not free: that would be refused as an abbreviation.
    free = [name for name in parser._option_string_actions if name.startswith("--") and not list(find_problems(name))]
    assert len(free) > len(parser._option_string_actions) - 2 * len(_SET) - 4
