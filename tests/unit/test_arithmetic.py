"""The example of arithmetic: its problems, its tokenizer, its rewards, and the results of its warm-up."""

import json
import random
from pathlib import Path

import pytest
import torch
import transformers

from examples.arithmetic import curves, demo, reward, task, warm_up
from examples.arithmetic import model as tiny
from examples.arithmetic.task import Problem
from megatron_rl.errors import ExitCode
from megatron_rl.observe import metrics
from megatron_rl.shared.weights.families import read_architecture
from tests.unit.test_audit import write_log


@pytest.fixture(scope="module")
def sets() -> task.Split:
    return task.split(0)


def test_no_problem_is_in_two_sets_not_even_with_its_operands_swapped(sets: task.Split) -> None:
    every = [*sets.warm_up, *sets.validation, *sets.train, *sets.held_out]
    assert len({frozenset((problem.left, problem.right)) for problem in every}) == len(every)
    assert len(sets.held_out) == 512


def test_a_seed_gives_the_same_problems_and_another_gives_others(sets: task.Split) -> None:
    assert task.split(0) == sets
    assert task.split(1).held_out != sets.held_out


def test_numbers_are_written_from_their_last_digit(tmp_path: Path) -> None:
    problem = Problem(347, 805)
    assert (problem.prompt, problem.answer) == ("743+508=", "2511")
    task.write([problem], tmp_path / "file.jsonl", "train")
    row = json.loads((tmp_path / "file.jsonl").read_text())
    assert row == {"id": "train-0", "prompt": "743+508=", "answer": "2511"}


def test_written_files_hold_the_problems_of_the_sets(sets: task.Split, tmp_path: Path) -> None:
    for path, problems in zip(task.write_files(tmp_path, 0), (sets.train, sets.held_out), strict=True):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [(row["prompt"], row["answer"]) for row in rows] == [(each.prompt, each.answer) for each in problems]
        assert len({row["id"] for row in rows}) == len(rows)


def test_a_saved_folder_gives_back_model_and_tokenizer(sets: task.Split, tmp_path: Path) -> None:
    model = tiny.draw(0)
    tiny.save(model, tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    problem = sets.train[0]
    text = problem.prompt + problem.answer
    ids = tokenizer(text)["input_ids"]
    assert [tiny.TOKENS[index] for index in ids] == list(text)
    end = tokenizer.eos_token_id
    assert tokenizer.decode([*ids, end], skip_special_tokens=True) == text
    row = warm_up.encode([problem])[0]
    assert row[: len(ids) + 1].tolist() == [*ids, end]
    assert set(row[len(ids) + 1 :].tolist()) <= {tokenizer.pad_token_id}
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (again.generation_config.eos_token_id, again.generation_config.pad_token_id) == (end, tokenizer.pad_token_id)
    assert torch.equal(again(row[None]).logits, model(row[None]).logits)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_of_the_demo_is_one_that_the_trainer_reads(family: str, tmp_path: Path) -> None:
    drawn = tiny.draw(0, family)
    tiny.save(drawn, tmp_path)
    assert read_architecture(tmp_path).num_layers == 2
    assert drawn.config.model_type == family


def test_only_the_exact_answer_is_rewarded() -> None:
    completions = ["236", "2361", "23", " 236", ""]
    columns = {"answer": ["236"] * 5, "id": ["train-0"] * 5}
    rewards = reward.right_answer(["743+582="] * 5, completions, [[0]] * 5, **columns)
    assert rewards == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_shuffled_rewards_keep_the_mean_of_a_group_and_ignore_the_response() -> None:
    completions = ["236", "236", "0", "1", "2", "3", "4", "5"]
    random.seed(0)
    draws = [reward.shuffled(["743+582="] * 8, completions, [[0]] * 8, ["236"] * 8) for _ in range(2000)]
    assert all(sum(rewards) == 2 for rewards in draws)
    means = torch.tensor(draws).mean(0)
    assert (means - 0.25).abs().max() < 0.05


def test_careless_solutions_forget_carries_and_do_nothing_else_wrong(sets: task.Split) -> None:
    draw = random.Random(0)
    for problem in sets.train[:200]:
        columns = [int(left) + int(right) for left, right in zip(problem.prompt[:3], problem.prompt[4:7], strict=True)]
        solutions = {task.careless(problem, draw) for _ in range(100)}
        if all(column < 9 for column in columns[:2]):
            assert solutions == {problem.answer}
        elif columns[0] >= 10:
            assert problem.answer in solutions
            assert len(solutions) > 1
        for solution in solutions:
            # Without its own carry each digit is its column's; with one it is the next.
            assert all((int(digit) - column) % 10 in (0, 1) for digit, column in zip(solution, columns, strict=False))


@pytest.mark.each_change
def test_warm_up_lowers_the_loss_and_is_the_same_for_the_same_seed(sets: task.Split) -> None:
    recipe = warm_up.Recipe(num_steps=20, batch_size=32, num_ramp_steps=1, steps_between_checks=10)
    models = [tiny.draw(3), tiny.draw(3)]
    checks = [list(warm_up.warm_up(model, sets, 3, recipe)) for model in models]
    assert checks[0] == checks[1]
    assert [step for step, _, _ in checks[0]] == [10, 20]
    before = warm_up.loss_of(tiny.draw(3), warm_up.encode(sets.validation)).item()
    after = warm_up.loss_of(models[0], warm_up.encode(sets.validation)).item()
    assert after < before - 0.5


def test_states_of_linear_layers_reach_from_the_first_digit_to_the_answer() -> None:
    for seed in range(2):
        layer = tiny.draw(seed, "qwen3_next").model.layers[0].linear_attn
        log_decay = -layer.A_log.exp() * torch.nn.functional.softplus(layer.dt_bias)
        assert (warm_up.PROMPT_LENGTH * log_decay).exp().max() > 0.05


@pytest.mark.each_change
def test_accuracy_is_that_of_the_most_likely_responses(sets: task.Split) -> None:
    """Check against generation, with a model that is right about some problems and wrong about others."""
    model = tiny.draw(0)
    problems = sets.validation[:8]
    recipe = warm_up.Recipe(num_steps=400, batch_size=8, num_ramp_steps=10, steps_between_checks=5)
    known = task.Split(warm_up=problems, validation=problems, train=[], held_out=[])
    next(check for check in warm_up.warm_up(model, known, 0, recipe) if check[2] >= 0.3)
    tokenizer = tiny.make_tokenizer()
    prompts = torch.tensor([tokenizer(problem.prompt)["input_ids"] for problem in problems])
    generated = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    texts = tokenizer.batch_decode(generated[:, prompts.shape[1] :], skip_special_tokens=True)
    right = [text == problem.answer for text, problem in zip(texts, problems, strict=True)]
    assert 0 < sum(right) < len(right)
    assert warm_up.accuracy(model, problems) == pytest.approx(sum(right) / len(right))


def test_runs_beside_each_other_come_to_a_table_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for number, (name, more) in enumerate({"one": {}, "the-other": {"prompts": {"considered": 7}}}.items()):
        run = tmp_path / f"{name}-3" / "run"
        run.mkdir(parents=True)
        records = [{"version": 0, "evaluation": {"pass": 0.1}}, {"version": 1, "groups": 4, **more}]
        records.append({"version": 2, "groups": 4, **more, "evaluation": {"pass": 0.5 + number / 4}})
        (run / metrics.FILE_NAME).write_text("".join(json.dumps(record) + "\n" for record in records))
        (run.parent / "result.json").write_text(json.dumps({"after": 0.5 + number / 4}))
    # Their results exist, so no run is needed.
    assert curves.compare({"one": [], "the other": []}, [3], tmp_path) == {"one": [0.5], "the other": [0.75]}
    printed = capsys.readouterr().out
    assert "50.0% (8)" in printed
    assert "75.0% (14)" in printed
    assert (tmp_path / "curves.svg").stat().st_size > 1000


def test_the_demo_on_a_gpu_stops_by_name_without_one_after_all_that_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    warmed_up = []
    monkeypatch.setattr(warm_up, "make", lambda folder, *others: warmed_up.append(folder))
    monkeypatch.setattr(demo, "train", lambda *arguments: pytest.fail("nothing trains without a GPU"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["demo", "--gpu", "--out", str(tmp_path / "demo")])
    with pytest.raises(SystemExit) as raised:
        demo.main()
    assert raised.value.code == ExitCode.ENVIRONMENT
    assert capsys.readouterr().err.startswith(f"no GPU: torch {torch.__version__} finds no CUDA device here")
    assert warmed_up == [tmp_path / "demo" / "model"]
    assert (tmp_path / "demo" / "train.jsonl").exists()


def test_the_demo_says_what_the_audit_found(tmp_path: Path) -> None:
    write_log(tmp_path / "audit.jsonl")
    said = demo.describe_audit(tmp_path)
    assert "0 breaches; in 4 of 4 publishes the engine's weights were compared bit for bit" in said
    log = tmp_path / "audit.jsonl"
    log.write_text(log.read_text().replace('"mean":', '"other":', 1))
    assert " 0 breaches" not in demo.describe_audit(tmp_path)
