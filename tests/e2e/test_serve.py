"""`megatron-rl serve` on a run's checkpoint of adapters, with real vLLM."""

import re
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import transformers

from megatron_rl.commands.rescore import log_probs
from tests.e2e import loop
from tests.serving import serving

pytestmark = [pytest.mark.each_change, pytest.mark.timeout(600)]
PROMPT = list(range(5, 25))


def test_a_runs_newest_checkpoint_is_served_with_the_published_weights_until_a_signal(tmp_path: Path) -> None:
    world = loop.make_world(tmp_path, head_dim=32)
    run, hf, save = (tmp_path / name for name in ("run", "hf", "save"))
    words = world.words(
        "run", rollout_folder=run, train_iters=2, save=save, save_hf=hf, lora_rank=2, lora_alpha=3.0, lr=1e-2,
        lora_targets=["q_proj", "down_proj"], prompts_held_out=4, eval_interval=1,
    )  # fmt: skip
    loop.run(tmp_path / "output", 1, words)
    # Without this folder the checkpoint of --save is converted.
    exported = (hf / "iter_0000002").rename(tmp_path / "exported")
    (published,) = {event["fingerprint"] for event in loop.read_events(run) if event.get("version") == 2}
    with serving(run) as served:
        assert served.name == f"version 2 of the run run, from {save / 'iter_0000002'}"
        assert served.fingerprint == published
        assert [(one["id"], one["max_model_len"]) for one in served.ask("/models")["data"]] == [("policy", 64)]
        call = {"model": "policy", "prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
        (choice,) = served.ask("/completions", call)["choices"]
        echoed = choice["logprobs"]["token_logprobs"][1 : len(PROMPT)]
        for path, key in (("/models", "other"), ("/../pause", served.key)):
            with pytest.raises(urllib.error.HTTPError, match="401|404"):
                served.ask(path, key=key)
    folder = Path(re.search(r"whose log is (\S+)/serve.log", served.printed)[1])
    assert not folder.exists()
    with pytest.raises(urllib.error.URLError, match="refused"):
        served.ask("/models")
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype="float32").eval()
    truth = log_probs(model, np.array(PROMPT[:1]), np.array(PROMPT[1:]), 1.0)
    np.testing.assert_allclose(echoed, truth, atol=1e-4)
