"""Whole runs with a teacher that real vLLM computes, beside one in the trainer's pass."""

from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from safetensors.torch import load_file

from megatron_rl.observe.metrics import read_metrics, without_times
from megatron_rl.rewards.model_folders import hash_folder
from megatron_rl.shared.protocol.wire import decode_tokens
from megatron_rl.shared.records.audit_check import verify
from megatron_rl.shared.records.journal import JOURNALS, Finished, find_journal, read_groups
from tests.e2e import loop
from tests.e2e.test_resume import assert_same, fault, killed, resumed, uninterrupted
from tests.truth import assert_near, everything_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
# Code that a rank runs before it begins: it writes the log-probs of teachers, as the loss gets them.
RECORD = """
import torch
from megatron_rl import platforms
platforms.select("cpu").install()
from megatron_rl.algorithm.objective import Objective
inner, numbers = Objective.loss, iter(range(1000))
def record(self, log_probs, *rest):
    torch.save(log_probs.others["teacher"].clone(), "{folder}/%03d.pt" % next(numbers))
    return inner(self, log_probs, *rest)
Objective.loss = record
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> loop.World:
    return loop.make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def teachers(world) -> dict[str, Path]:
    """Draw two teachers of other depths than the policy; vLLM on a CPU has kernels for heads of 32."""
    return {
        name: loop.draw_model(world.folder / name, seed, num_hidden_layers=layers, hidden_size=96, head_dim=32)
        for name, seed, layers in (("even", 5, 3), ("odd", 6, 1))
    }


def name_flags(teachers: dict[str, Path], kind: str = "engines:") -> dict[str, object]:
    words = [f"even={kind}{teachers['even']}", f"odd={teachers['odd']}"]
    return {"algorithm": "opd", "opd_discount": 0.5, "teacher": words}


def run(world: loop.World, name: str, **changes) -> tuple[Path, list[torch.Tensor]]:
    """Return the run's folder, and the log-probs of teachers in each micro-batch."""
    folder = world.folder / name
    folder.mkdir()
    places = {"rollout_folder": folder / "run", "save_hf": folder / "hf"}
    loop.run(folder, 1, world.words("run", **places, **changes), {0: RECORD.format(folder=folder)})
    assert verify(folder / "run").breaches == []
    return folder, [torch.load(path) for path in sorted(folder.glob("*.pt"))]


def compute_truth(teacher: Path, group: Finished) -> torch.Tensor:
    """Compute the log-probs of a group's responses in float64."""
    model, prompt = transformers.AutoModelForCausalLM.from_pretrained(teacher).double(), group.prompt_tokens
    found = []
    for response in group.responses:
        tokens = torch.from_numpy(decode_tokens(prompt + response.tokens).astype("int64"))
        first = len(prompt) // 4
        with torch.no_grad(), everything_in(torch.float64):
            logits_TV = model(tokens[None]).logits[0, first - 1 : -1]
        found.append(logits_TV.log_softmax(-1).gather(1, tokens[first:, None])[:, 0])
    return torch.cat(found)


def test_engines_give_a_teachers_log_probs_to_the_same_bits_under_both_schedules(world, teachers) -> None:
    flags = name_flags(teachers)
    folder, served = run(world, "periodic", **flags, train_iters=2)
    other, again = run(world, "sync", **flags, train_iters=2, schedule="sync")
    assert all(torch.equal(one, same) for one, same in zip(served, again, strict=True))
    assert without_times(read_metrics(folder / "run")) == without_times(read_metrics(other / "run"))
    weights, same = (load_file(one / "hf" / "iter_0000002" / "model.safetensors") for one in (folder, other))
    assert all(torch.equal(tensor, same[name]) for name, tensor in weights.items())
    (objective,) = [event for event in loop.read_events(folder / "run") if event["event"] == "objective"]
    assert objective["values"]["weights of the teacher.even"] == hash_folder(teachers["even"])

    _, inside = run(world, "inside", **name_flags(teachers, ""), train_iters=1)
    num_served = 0
    for group in read_groups(find_journal(folder / "run" / JOURNALS, 0)):
        both = served[group.prompt_index], inside[group.prompt_index]
        if group.responses[0].teacher_log_probs is msgspec.UNSET:
            assert torch.equal(*both)
        else:
            num_served += 1
            assert_near(both[:1], both[1:], [compute_truth(teachers["even"], group)])
    assert num_served == 4


def test_a_run_with_engines_for_a_teacher_that_was_killed_resumes(world, teachers) -> None:
    changes = name_flags(teachers)
    whole = uninterrupted(world, "whole", 1, **changes)
    folder = killed(world, "killed", 1, {0: fault("optimizer", "rank", call=2)}, seconds=600, **changes)
    resumed(world, folder, 1, **changes)
    assert_same(folder, whole)
