"""Whole runs whose rewards a classifier gives, or a judge with real vLLM."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_rl.observe.metrics import read_metrics, without_times
from megatron_rl.rewards.model_folders import hash_folder
from megatron_rl.shared.records.audit_check import verify
from tests.e2e import loop

END = 1
_WIDTH = 160


def draw_classifier(folder: Path) -> Path:
    """Draw a classifier whose tokens are numbers."""
    loop.draw_model(folder)
    config = transformers.AutoConfig.from_pretrained(folder, id2label={0: "score"}, label2id={"score": 0})
    torch.manual_seed(3)
    transformers.Qwen3ForSequenceClassification(config).save_pretrained(folder)
    return folder


def answer(token: int) -> int:
    """Return the token with which the judge follows this one: a number, and then the end."""
    return END if token < 5 else 2 + token % 3


def draw_judge(folder: Path) -> Path:
    """Draw a model that follows each token by another, whatever came before."""
    loop.draw_model(folder, hidden_size=_WIDTH, head_dim=32)
    weights = load_file(file := folder / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    size = len(weights["lm_head.weight"])
    weights["model.embed_tokens.weight"] = torch.eye(size, _WIDTH)
    weights["model.norm.weight"].fill_(1)
    weights["lm_head.weight"] = torch.zeros(size, _WIDTH)
    for token in range(size):
        weights["lm_head.weight"][answer(token), token] = 1
    save_file(weights, file, {"format": "pt"})
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    return folder


def run(world: loop.World, model: Path, **changes) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """Train under both schedules, which must end in the same; return the metrics and the weights."""
    results = []
    for schedule in ("periodic", "sync"):
        folder = world.folder / schedule
        places = {"rollout_folder": folder / "run", "save_hf": folder / "hf", "schedule": schedule}
        loop.run(folder, 1, world.words("run", **places, **changes))
        (objective,) = [event for event in loop.read_events(folder / "run") if event["event"] == "objective"]
        assert objective["values"][str(model)] == f"blake3 {hash_folder(model)[:12]}"
        assert verify(folder / "run").breaches == []
        last = sorted((folder / "hf").glob("iter_*"))[-1]
        results.append((without_times(read_metrics(folder / "run")), load_file(last / "model.safetensors")))
    (lines, weights), (others, same) = results
    assert lines == others
    assert all(torch.equal(tensor, same[name]) for name, tensor in weights.items())
    return lines, weights


@pytest.mark.each_change
def test_a_run_learns_the_numbers_of_a_classifier_to_the_same_bits_under_both_schedules(tmp_path) -> None:
    world, model = loop.make_world(tmp_path), draw_classifier(tmp_path / "classifier")
    lines, _ = run(world, model, reward=[f"model:{model}=2", "length:12"], train_iters=2)
    for line in lines:
        reward = line["reward"]
        assert reward["mean"] == pytest.approx(2 * reward["model"] + reward["length"])
        assert reward["std"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_learns_the_scores_of_a_judge_to_the_same_bits_under_both_schedules(tmp_path) -> None:
    """Have a judge whose answer follows from the last token of the response: it is a number, or empty."""
    world, model = loop.make_world(tmp_path), draw_judge(tmp_path / "judge")
    (question := tmp_path / "question.txt").write_text("9 {prompt} 8 {answer} 7 {response}")
    judge = {
        "reward": [f"judge:{model}@120"], "judge_prompt": question, "judge_pattern": r"(\d+)", "judge_default": -1,
        "judge_max_tokens": 8, "judge_vllm_args": "--dtype float32",
    }  # fmt: skip
    lines, _ = run(world, model, **judge, train_iters=2)
    for line in lines:
        reward = line["reward"]
        assert (reward["judge:cut"], reward["judge:malformed"]) == (0, 0)
        assert reward["min"] >= -1
        assert reward["max"] in (2, 3, 4)
    assert any(line["reward"]["judge:missing"] > 0 for line in lines)
    scored = [
        (response["components"], response["reward"])
        for event in loop.read_events(tmp_path / "sync" / "run")
        if event["event"] == "group"
        for response in event["responses"]
    ]
    assert {reward for _, reward in scored} == {-1.0, 2.0, 3.0, 4.0}
    assert all(components["judge:missing"] == (reward == -1) for components, reward in scored)
