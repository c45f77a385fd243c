"""The divergence from a teacher, the messages that carry its hidden states, and flags that do not fit.

Whole models are in tests/distributed. Letters: N rows, E and F hidden sizes, V columns of the vocabulary.
"""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch

from examples.arithmetic import model as tiny
from megatron_rl.errors import InputError
from megatron_rl.ops.log_probs import TargetRows, VocabularyShard, output_log_probs
from megatron_rl.ops.log_probs.divergence import output_divergences
from megatron_rl.trainer.data.prompt_files import Row
from megatron_rl.trainer.data.teacher import check_choices, check_tokens
from megatron_rl.trainer.mcore.step.piggyback import Piggyback
from megatron_rl.types import Divergence, Rope, RopeKind
from tests.command_lines import QWEN3, RUN, error, folder, parse, run_problems
from tests.grpo_twin import Teaching, _diverge
from tests.live_memory import LiveMemory
from tests.ranks import run_ranks
from tests.truth import assert_near, distance

VOCAB_SIZE, PADDED = 300, 320
TEMPERATURE = 0.7
FORMS = [
    Divergence(kind, top_k, 0.3) for kind, top_k in itertools.product(("reverse", "forward", "jsd"), (None, 1, 9, 300))
]
YARN = Rope(base=1e6, kind=RopeKind.YARN, factor=4.0, original_max_positions=64)
Drawn = tuple[torch.Tensor, ...]


def draw(num_rows: int = 21, num_columns: int = PADDED, policy: int = 24, teacher: int = 16) -> Drawn:
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_rows, policy), (num_columns, policy), (num_rows, teacher), (num_columns, teacher), (num_rows,))
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return (drawn[0], 0.3 * drawn[1], drawn[2], 0.3 * drawn[3], drawn[4])


def dense(form: Divergence, drawn: Drawn, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the divergence of each row and its gradients, from whole arrays of log-probs."""
    hidden_NE, weight_VE, other_NF, other_VF, grad_N = (tensor.to(dtype) for tensor in drawn)
    hidden_NE, weight_VE = hidden_NE.requires_grad_(), weight_VE.requires_grad_()
    p_NV, q_NV = (
        (hidden @ weight[:VOCAB_SIZE].T / TEMPERATURE).log_softmax(-1)
        for hidden, weight in ((hidden_NE, weight_VE), (other_NF, other_VF))
    )
    # All tokens leave no other one.
    top_k = None if form.top_k == VOCAB_SIZE else form.top_k
    out_N = _diverge(Teaching(Path(), form.kind, top_k, form.mixture), p_NV, q_NV)
    return [out_N.detach(), *torch.autograd.grad(out_N, (hidden_NE, weight_VE), grad_N)]


def ours(form: Divergence, drawn: Drawn, block_columns: int = 64, rank: int = 0, size: int = 1) -> list[torch.Tensor]:
    hidden_NE, weight_VE, other_NF, other_VF, grad_N = (tensor.float() for tensor in drawn)
    count = PADDED // size
    part = slice(rank * count, (rank + 1) * count)
    policy = TargetRows(hidden_NE.requires_grad_(), weight_VE[part].clone().requires_grad_())
    shard = VocabularyShard(rank * count, VOCAB_SIZE, torch.distributed.group.WORLD if size > 1 else None)
    teachers = [(TargetRows(other_NF, other_VF[part]), form)]
    targets_N = torch.arange(len(hidden_NE))
    out_N = output_divergences(policy, targets_N, teachers, shard, TEMPERATURE, block_columns)[:, 1]
    return [out_N.detach(), *torch.autograd.grad(out_N, (policy.hidden_NE, policy.weight_VE), grad_N)]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_divergence_is_as_near_to_the_truth_as_the_dense_formula(form) -> None:
    drawn = draw()
    assert_near(ours(form, drawn), dense(form, drawn, torch.float32), dense(form, drawn, torch.float64))


def test_log_probs_and_entropies_beside_divergences_are_what_they_are_alone() -> None:
    *drawn, _ = draw()
    hidden_NE, weight_VE, *_ = tensors = [tensor.float().requires_grad_() for tensor in drawn]
    other_NF, other_VF = (tensor.detach() for tensor in tensors[2:])
    targets_N = torch.randint(VOCAB_SIZE, (len(hidden_NE),), generator=torch.Generator().manual_seed(1))
    shard, teachers = VocabularyShard(0, VOCAB_SIZE), [(TargetRows(other_NF, other_VF), form) for form in FORMS]
    grad_NK = torch.randn(len(hidden_NE), 2 + len(FORMS), generator=torch.Generator().manual_seed(2))

    def compute(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (hidden_NE, weight_VE)]
        logits_NV = leaves[0] @ leaves[1][:VOCAB_SIZE].T / TEMPERATURE
        all_NV = logits_NV.log_softmax(-1)
        teacher_NV = (other_NF.to(dtype) @ other_VF[:VOCAB_SIZE].to(dtype).T / TEMPERATURE).log_softmax(-1)
        parts = [all_NV.gather(1, targets_N[:, None])[:, 0], -(all_NV.exp() * all_NV).sum(1)]
        for form in FORMS:
            top_k = None if form.top_k == VOCAB_SIZE else form.top_k
            parts.append(_diverge(Teaching(Path(), form.kind, top_k, form.mixture), all_NV, teacher_NV))
        out_NK = torch.stack(parts, dim=1)
        return [out_NK.detach(), *torch.autograd.grad(out_NK, leaves, grad_NK.to(dtype))]

    policy = TargetRows(hidden_NE, weight_VE)
    out_NK = output_divergences(policy, targets_N, teachers, shard, TEMPERATURE, 64, with_entropies=True)
    alone_N2 = output_log_probs(hidden_NE, weight_VE, targets_N, shard, TEMPERATURE, 64, with_entropies=True)
    assert torch.equal(out_NK[:, :2], alone_N2)
    grads = torch.autograd.grad(out_NK, (hidden_NE, weight_VE), grad_NK)
    assert_near([out_NK.detach(), *grads], compute(torch.float32), compute(torch.float64))


def on_ranks(drawn: Drawn) -> list[list[torch.Tensor]]:
    torch.distributed.init_process_group("gloo")
    results = []
    for form in FORMS:
        found = ours(form, drawn, 50, torch.distributed.get_rank(), torch.distributed.get_world_size())
        torch.distributed.all_reduce(found[1])
        results.append(found)
    return results


def test_a_vocabulary_divided_over_ranks_gives_the_same() -> None:
    drawn = draw()
    # The last rank has fewer columns of tokens than the others.
    ranks = run_ranks(on_ranks, 4, drawn)
    for number, form in enumerate(FORMS):
        grad_weight_VE = torch.cat([of_rank[number][2] for of_rank in ranks])
        for of_rank in ranks:
            found = [*of_rank[number][:2], grad_weight_VE]
            assert_near(found, dense(form, drawn, torch.float32), dense(form, drawn, torch.float64))


@pytest.mark.parametrize("form", [form for form in FORMS if form.top_k in (1, 9)], ids=str)
def test_the_tokens_that_count_together_may_be_next_to_impossible(form) -> None:
    """Let all but a billionth of both be on a few tokens, which are the same ones or others."""
    hidden_NE, weight_VE, other_NF, other_VF, grad_N = draw()
    for scale in (3.0, 8.0, 20.0):
        sharp = (scale * hidden_NE, weight_VE, scale * other_NF, other_VF, grad_N)
        alike = (scale * hidden_NE, weight_VE, scale * 1.05 * hidden_NE, weight_VE.clone(), grad_N)
        for drawn in (sharp, alike):
            theirs, truth = (dense(form, drawn, dtype) for dtype in (torch.float32, torch.float64))
            for one, other, exact in zip(ours(form, drawn), theirs, truth, strict=True):
                assert distance(one, exact) <= max(4 * distance(other, exact), 2e-5 * exact.abs().max().item())


def test_no_array_of_rows_times_vocabulary_exists() -> None:
    num_rows, num_columns, block_columns = 64, 40_000, 1_000
    hidden_NE, weight_VE, other_NF, other_VF, _ = (one.float() for one in draw(num_rows, num_columns, 8, 4))
    policy = TargetRows(hidden_NE.requires_grad_(), weight_VE.requires_grad_())
    whole = num_rows * num_columns * 4
    for form in FORMS:
        with LiveMemory([hidden_NE, weight_VE, other_NF, other_VF]) as memory:
            teachers, shard = [(TargetRows(other_NF, other_VF), form)], VocabularyShard(0, num_columns)
            targets_N = torch.arange(num_rows)
            out_N = output_divergences(policy, targets_N, teachers, shard, 1.0, block_columns, with_entropies=True)
            grads = torch.autograd.grad(out_N.sum(), (policy.hidden_NE, policy.weight_VE))
        of_results = sum(grad.nbytes for grad in grads)
        # Some blocks of all rows, of the fortieth part of the columns.
        assert memory.peak - of_results < 12 * whole / 40, form


def test_a_divergence_from_oneself_is_zero_and_so_is_its_gradient() -> None:
    hidden_NE, weight_VE, *_, grad_N = draw()
    for form in FORMS:
        found = ours(form, (hidden_NE, weight_VE, hidden_NE, weight_VE, grad_N))
        assert max(one.abs().max().item() for one in found) < 2e-6, form


@pytest.mark.parametrize("widths", [(), (8,), (5,), (13,), (1,), (8, 3), (31, 1, 8)])
def test_hidden_states_of_any_width_arrive_as_they_were_sent(widths) -> None:
    for num_rows in (1, 2, 3, 7, 64):
        stage = Piggyback.__new__(Piggyback)
        stage._width, stage._frozen = 8, {}
        policy = torch.randn(num_rows, 1, 8)
        frozen = [torch.randn(num_rows, 1, width) for width in widths]
        stage.put(policy, frozen)
        message = stage._join(policy)
        assert message.shape == (num_rows, 1, 8 + sum(widths))
        received = stage._split(message)
        assert torch.equal(received, policy)
        for sent, came in zip(frozen, stage.take(received, widths), strict=True):
            assert torch.equal(sent, came)


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    """Write a policy and a wider teacher; return the words that name both."""
    teacher = dataclasses.replace(QWEN3, family="llama", qk_layernorm=False, hidden_size=96, num_layers=5)
    policy = folder(tmp_path / "policy", QWEN3)
    return ["--platform cpu --hf-model", policy, "--teacher", folder(tmp_path / "teacher", teacher)]


def test_a_teacher_has_its_own_layers_on_the_policys_stages(models) -> None:
    pipeline = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    settings = parse(*models, pipeline, "--grpo-kl-beta 0.1", world_size=2)
    teacher = settings.frozen["teacher"]
    assert (teacher.architecture.num_layers, settings.architecture.num_layers) == (5, 4)
    assert teacher.transformer.hidden_size == 96
    assert teacher.parallel_sizes == settings.parallel_sizes


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--opd-top-k 4", "--opd-top-k 4 needs a divergence over the vocabulary"),
        ("--opd-mixture 0.2", "--opd-mixture 0.2 needs --opd-divergence jsd"),
        ("--opd-divergence reverse --opd-discount 0.5", "--opd-discount 0.5 needs --opd-divergence sampled"),
        ("--opd-divergence jsd --opd-mixture 1", "--opd-mixture 1 must be above 0 and below 1"),
        ("--algorithm opd --grpo-filter-groups-with-same-reward", "since rewards do not count: drop the filter"),
        ("--opd-coef 0", "--opd-coef 0 must be above 0"),
        ("--opd-divergence reverse --tri-model separate", "cannot be given together"),
        ("--opd-divergence reverse --grpo-advantage batch", "--opd-divergence reverse and --grpo-advantage batch"),
        ("--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2", "virtual pipeline stages"),
    ],
)
def test_flags_that_do_not_fit_are_named(words, said, models) -> None:
    assert said in error(*models, words, world_size=4)


def test_teachers_that_do_not_fit_are_named(models, tmp_path) -> None:
    policy = models[:2]
    for name, changes, words, said in (
        ("words", {"vocab_size": 190}, "", "its vocabulary has 190 rows, and the policy's 200"),
        ("more", {"vocab_size": 264}, "--opd-divergence forward", "its vocabulary has 264 rows"),
        (
            "heads",
            {"num_attention_heads": 6, "num_query_groups": 3},
            "--tensor-model-parallel-size 2",
            "3 query groups",
        ),
        ("short", {"max_position_embeddings": 64}, "--seq-length 128", "above the model's longest sequence, 64"),
        ("yarn", {"rope": YARN}, "--batch-invariant", "--batch-invariant"),
        ("flat", {"num_layers": 1}, "--pipeline-model-parallel-size 2", "it has 1 layers for 2 stages"),
    ):
        teacher = folder(tmp_path / name, dataclasses.replace(QWEN3, **changes))
        assert f"--teacher {teacher}: " in (text := error(*policy, "--teacher", teacher, words, world_size=2))
        assert said in text
    assert "--teacher must be a folder" in error(*policy, "--teacher", str(tmp_path / "missing"))
    assert "--algorithm opd needs --teacher" in error(*policy, "--algorithm opd")
    assert "leaves no gradient: add --teacher" in error(*policy, "--grpo-advantage none")
    assert not parse(*policy, "--grpo-advantage none --grpo-kl-beta 0.1").frozen
    assert "--opd-coef 2 needs --teacher" in error(*policy, "--opd-coef 2")
    assert parse(*policy, "--teacher", str(tmp_path / "more")).frozen.keys() == {"teacher"}


def test_several_teachers_have_a_name_each(models, tmp_path) -> None:
    *policy, flag, teacher = models
    other = folder(tmp_path / "a=b", QWEN3)
    settings = parse(*policy, flag, f"math={teacher}", f"code-2={other}")
    assert {name: one.model.hf_model for name, one in settings.frozen.items()} == {
        "teacher.math": Path(teacher),
        "teacher.code-2": Path(other),
    }
    for words in ((teacher, other), (f"math={teacher}", other), (f"math={teacher}", f"math={other}")):
        assert "several need a name each, none of them twice; write NAME=FOLDER" in error(*policy, flag, *words)
    assert f"{flag} {tmp_path / 'none'}: " in error(*policy, flag, f"a={tmp_path / 'none'}")


def test_each_row_names_a_teacher_of_the_run(tmp_path) -> None:
    rows = [Row("a:1", tmp_path, 1, "a", {"teacher": "math"}), Row("a:2", tmp_path, 2, "a", {"answer": "5"})]
    check_choices(["teacher"], rows)
    check_choices(["teacher.math", "teacher.code"], rows[:1])
    with pytest.raises(
        InputError, match="has the column teacher None, and must have one of --teacher: write code or math"
    ):
        check_choices(["teacher.math", "teacher.code"], rows)
    with pytest.raises(InputError, match=r"has the column teacher \['math'\]"):
        check_choices(["teacher.math"], [Row("a:3", tmp_path, 3, "a", {"teacher": ["math"]})])
    with pytest.raises(InputError, match="has the column teacher 'math', and must have one of --teacher: write code"):
        check_choices(["teacher.code"], rows)


def test_a_teacher_can_be_kept_in_host_memory(models) -> None:
    for words in ("", "--lora-rank 4"):
        problems = run_problems(*models, *RUN, words, "--frozen-offload --train-iters 0")
        assert not any("--frozen-offload" in problem for problem in problems), problems


def test_a_teacher_with_other_tokens_is_refused(tmp_path) -> None:
    tokenizer = tiny.make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "same")
    check_tokens("--teacher", tmp_path / "same", tmp_path / "policy", [[1, 2, 10, 3]])
    tokenizer.add_tokens(["?"])
    tokenizer.save_pretrained(tmp_path / "more")
    with pytest.raises(InputError, match=r"--teacher .* has other tokens: 1 differ, and '\?' is 14 in place of None"):
        check_tokens("--teacher", tmp_path / "more", tmp_path / "policy", [])
    with pytest.raises(InputError, match="--teacher .* must be a folder"):
        check_tokens("--teacher", tmp_path / "missing", tmp_path / "policy", [])
