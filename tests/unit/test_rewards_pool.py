"""Reward functions in workers: signatures, weights, determinism, speed, files that do not load."""

import asyncio
import dataclasses
from pathlib import Path

import psutil
import pytest

from megatron_rl.confined.pool import PoolSettings
from megatron_rl.errors import UsageError
from megatron_rl.rewards import pool
from megatron_rl.rewards.pool import RewardPool
from megatron_rl.rewards.spec import parse_specs
from megatron_rl.rewards.types import RewardError
from tests.reward_pools import in_event_loop, request, rewarding, score, write

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "rewards"
TRL_STYLE = """
    import re

    def format_reward(completions, **kwargs):
        pattern = r"^<think>.*?</think><answer>.*?</answer>$"
        contents = [completion[0]["content"] for completion in completions]
        return [1.0 if re.match(pattern, content) else 0.0 for content in contents]

    def reward_num_unique_letters(prompts, completions, completion_ids, ground_truth, **kwargs):
        assert [prompt[-1]["content"] for prompt in prompts] == ["spell"] * len(completions)
        assert [len(ids) for ids in completion_ids] == [len(completion[0]["content"]) for completion in completions]
        return [len(set(c[0]["content"])) - truth for c, truth in zip(completions, ground_truth)]
"""


def test_functions_in_trls_style_run_unchanged_on_chat_data(tmp_path):
    file = write(tmp_path, TRL_STYLE)
    group = request(
        completions=["<think>a</think><answer>b</answer>", "aab"],
        prompt=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "spell"}],
        ground_truth=2,
    )
    [result] = score([f"{file}:format_reward", f"{file}:reward_num_unique_letters=0.5"], group)
    assert result.components == {"format_reward": [1.0, 0.0], "reward_num_unique_letters": [14 - 2, 0.0]}
    assert result.rewards == [1.0 + 0.5 * 12, 0.0]
    assert result.errors == {}
    assert result.seconds > 0


def test_text_data_gives_functions_plain_strings_and_only_what_they_name(tmp_path):
    file = write(
        tmp_path,
        """
        async def both(prompts, completions):
            import asyncio
            await asyncio.sleep(0)
            return [float(prompt == "p") * len(text) for prompt, text in zip(prompts, completions)]
        """,
    )
    [result] = score([f"{file}:both"], request(answer=1))
    assert result.rewards == [1.0, 2.0]


def test_a_reward_of_none_leaves_a_completion_to_the_other_functions(tmp_path):
    file = write(
        tmp_path,
        """
        def short(completions, **kwargs):
            return [1.0 if len(text) == 1 else None for text in completions]
        def constant(completions, **kwargs):
            return [0.5] * len(completions)
        """,
    )
    [result] = score([f"{file}:short", f"{file}:constant=2"], request())
    assert result.components["short"] == [1.0, None]
    assert result.rewards == [2.0, 1.0]
    # It is not scored if none applies.
    [result] = score([f"{file}:short"], request(index=9))
    assert result.rewards == [1.0, None]
    [result] = score([f"{file}:short"], request(), on_error=-1.0)
    assert result.rewards == [1.0, -1.0]
    assert result.errors == {"short": "no function applies to completion 1"}


def test_a_weight_of_zero_only_measures(tmp_path):
    file = write(tmp_path, "def length(completions, **kwargs): return [len(text) for text in completions]")
    [result] = score([f"{file}:length=0"], request())
    assert result.rewards == [0.0, 0.0]
    assert result.components == {"length": [1.0, 2.0]}


def test_functions_get_copies_of_their_own_and_the_same_random_numbers_on_every_worker(tmp_path):
    file = write(
        tmp_path,
        """
        import random
        def greedy(completions, notes, **kwargs):
            completions.append("more")
            notes[0]["seen"] = True
            assert "seen" not in notes[1]
            return [0.0] * (len(completions) - 1)
        def drawn(completions, notes, **kwargs):
            assert len(completions) == 2 and notes[0] == {}
            return [random.random() + hash(text) % 7 for text in completions]
        """,
    )
    specs = [f"{file}:greedy", f"{file}:drawn"]
    groups = [request(index, notes={}) for index in range(6)]
    first = score(specs, *groups, num_workers=1)
    second = score(specs, *reversed(groups), num_workers=3)[::-1]
    assert [result.rewards for result in first] == [result.rewards for result in second]
    assert first[0].rewards != first[1].rewards


def test_examples_and_ready_made_rewards_run_in_workers():
    specs = [
        "gsm8k",
        "length:2=0.5",
        f"{EXAMPLES}/brevity.py:brevity=0",
        f"{EXAMPLES}/brevity.py:answers_in_time",
        f"{EXAMPLES}/from_verl.py:reward",
    ]
    [result] = score(specs, request(completions=["it is 7", "8"], answer="#### 7", data_source="gsm8k", ground_truth=7))
    assert result.components["gsm8k"] == [1.0, 0.0]
    assert result.components["length"] == [-1.0, 0.0]
    assert result.components["answers_in_time"] == [None, None]
    assert result.components["reward"] == [1.0, 0.0]
    assert result.rewards == [1.5, 0.0]


def test_math_verify_works_inside_the_confinement():
    pytest.importorskip("math_verify")
    [result] = score(["math"], request(completions=[r"$\boxed{\frac12}$", "$2$"], solution="$0.5$"), timeout=30)
    assert result.rewards == [1.0, 0.0]


def test_a_file_imports_its_neighbours_and_its_print_goes_to_the_log(tmp_path):
    write(tmp_path, "WORTH = 3.0", "neighbour.py")
    file = write(
        tmp_path,
        """
        import neighbour
        def fn(completions, **kwargs):
            print("hello from the function")
            return [neighbour.WORTH] * len(completions)
        """,
    )
    log = tmp_path / "rewards.log"
    [result] = score([f"{file}:fn"], request(), log=log)
    assert result.rewards == [3.0, 3.0]
    assert log.read_text() == "hello from the function\n"


def test_the_identity_of_a_pool_changes_with_all_that_may_change_a_score_and_nothing_else(tmp_path, monkeypatch):
    code = "def fn(completions, **kwargs): return [{}] * len(completions)\ndef other(completions, **kwargs): return []"
    file, copy = (write(tmp_path, code.format(1.0), name) for name in ("mine.py", "copy.py"))
    monkeypatch.chdir(tmp_path)

    def identity(*specs, **settings):
        return RewardPool(parse_specs(specs, 5), PoolSettings(num_workers=1, **settings)).identity

    mine = f"{file}:fn"
    ours = identity(mine, "regex:x")
    assert identity("mine.py:fn=1", "regex:x", confine="off") == ours
    changed = [
        identity(mine),
        identity(mine, "regex:y"),
        identity(f"{file}:other", "regex:x"),
        identity(f"{copy}:fn", "regex:x"),
        identity(f"{mine}=2", "regex:x"),
        identity(f"{mine}@6", "regex:x"),
        identity(mine, "regex:x", on_error=-1.0),
    ]
    write(tmp_path, code.format(2.0))
    assert len({ours, *changed, identity(mine, "regex:x")}) == len(changed) + 2


def test_a_file_or_function_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UsageError, match="has no function fn, did you mean fun?"):
        score([f"{write(tmp_path, 'def fun(): pass')}:fn"], request())
    with pytest.raises(UsageError, match="nowhere.py cannot be read"):
        score(["nowhere.py:fn"], request())
    (tmp_path / "loop.py").symlink_to(tmp_path / "loop.py")
    with pytest.raises(UsageError, match=r"loop.py cannot be read: .*Too many levels of symbolic links"):
        score([f"{tmp_path}/loop.py:fn"], request())


@in_event_loop
async def test_two_thousand_groups_of_eight_need_no_other_workers_than_those_of_the_start(tmp_path):
    file = write(tmp_path, "def fn(completions, **kwargs): return [float(len(text)) for text in completions]")
    groups = [request(index, ["x" * 400] * 8, answer="#### 1") for index in range(2000)]

    async with rewarding([f"{file}:fn"]) as pool:
        before = set(psutil.Process().children(recursive=True))
        results = await asyncio.gather(*map(pool.score, groups))
        assert before == set(psutil.Process().children(recursive=True))
    assert all(result.rewards == [400.0] * 8 for result in results)


@in_event_loop
async def test_groups_that_wait_when_the_pool_closes_or_are_cancelled_fail_cleanly(tmp_path):
    file = write(
        tmp_path,
        """
        import time
        def fn(completions, seconds, **kwargs):
            time.sleep(seconds[0])
            return [1.0] * len(completions)
        """,
    )

    async with rewarding([f"{file}:fn"], num_workers=2, timeout=60) as pool:
        tasks = [asyncio.create_task(pool.score(request(index, seconds=30))) for index in range(3)]
        await asyncio.sleep(0.1)
        tasks[0].cancel()
        await asyncio.gather(tasks[0], return_exceptions=True)
        await pool.close()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(ends[0], asyncio.CancelledError)
    assert all(isinstance(end, RewardError) and "the run is ending" in str(end) for end in ends[1:])


def test_a_pool_without_functions_or_workers_is_refused():
    with pytest.raises(UsageError, match="--reward is missing"):
        RewardPool([])
    with pytest.raises(UsageError, match="--reward-workers 0"):
        RewardPool(parse_specs(["exact"]), PoolSettings(num_workers=0))


TRIALS = {
    "answer is not a column": ("def f(completions, answer): return [0.0] * len(completions)", (
        r"it asks for answer, and the row has no such column \(it has gold\): add it, or write --answer-key COLUMN "
        r"for the column that holds the answer$"
    )),
    "another is not a column": ("def f(completions, target): ...", (
        r"it asks for target, .* \(it has gold\): add it, rename the parameter to a column, or to answer and "
    )),
    "text": ("def f(completions, **columns): return ['1'] * len(completions)", (
        r"completion 0 got '1' \(str\), not a number; correct the function$"
    )),
    "one for all": ("def f(completions, **columns): return 1.0", "returned float, not a list of numbers; correct"),
    "too few": ("def f(completions, **columns): return [1.0]", "returned 1 rewards for 2 completions; correct"),
    "an import inside": ("def f(completions, **columns):\n    import no_such_module", (
        r"ModuleNotFoundError: No module named 'no_such_module' \(.*mine.py:2\); correct the function$"
    )),
    "an async one": ("async def f(completions, **columns): return None", "returned NoneType, not a list"),
}  # fmt: skip


@pytest.mark.parametrize("trial", TRIALS)
def test_a_function_that_fails_for_every_completion_ends_the_start_by_name_and_leaves_nothing(tmp_path, trial):
    code, message = TRIALS[trial]
    file = write(tmp_path, code)
    with pytest.raises(UsageError, match=rf"^--reward f: {message}") as raised:
        score([f"{file}:f"], trials=[request(gold="42")])
    assert "--reward-on-error" not in str(raised.value)


def test_every_function_is_tried_and_each_that_fails_is_named(tmp_path):
    file = write(tmp_path, "def good(completions, **columns): return [1.0] * len(completions)\ndef bad(nothing): ...")
    with pytest.raises(UsageError) as raised:
        score([f"{file}:bad", f"{file}:good", "gsm8k"], trials=[request(gold="42")])
    assert [problem.partition(":")[0] for problem in raised.value.problems] == ["--reward bad", "--reward gsm8k"]


def test_rows_with_other_columns_are_tried_too_and_named(tmp_path):
    file = write(tmp_path, "def f(completions, answer): return [0.0] * len(completions)")
    rows = [dataclasses.replace(request(answer="4"), row="a:1"), dataclasses.replace(request(gold="4"), row="a:7")]
    with pytest.raises(UsageError, match=r"^--reward f: a:7: it asks for answer, and the row has no such column"):
        score([f"{file}:f"], trials=rows)


FINE = {
    "parses what it is given": "    return [float(text.split('=')[1]) for text in completions]",
    "gives no finite number": "    return [float('nan') if text.startswith('This') else 1.0 for text in completions]",
    "ends its process": "    import os\n    os._exit(3) if len(completions) == 2 else None\n    return [1.0]",
    "takes long": "    import time\n    time.sleep(60) if len(completions) == 2 else None\n    return [1.0]",
}


@pytest.mark.parametrize("case", FINE)
def test_a_failure_that_only_the_trial_may_cause_does_not_refuse_a_function(tmp_path, case, monkeypatch):
    monkeypatch.setattr(pool, "_TRIAL_SECONDS", 0.5)
    file = write(tmp_path, f"def f(completions, **columns):\n{FINE[case]}")
    [result] = score([f"{file}:f"], request(completions=["x=1.0"]), trials=[request()], num_workers=1)
    assert result.rewards == [1.0]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return [float(text.split('=')[1] == gold) for text in completions]", "IndexError: list index out of range ("),
        ("raise KeyError('solution')", "KeyError: 'solution' ("),
        ("return [float('nan') for text in completions]", "ValueError: completion 0 got nan, not a finite number;"),
    ],
)
@in_event_loop
async def test_a_function_that_fails_in_every_trial_is_warned_of(tmp_path, body, said):
    code = f"def f(completions, gold): {body}"
    rows = [request(gold="1"), request(gold="2")]
    async with rewarding([f"{write(tmp_path, code)}:f"], trials=rows) as pool:
        (warning,) = pool.warnings
    assert warning.startswith(f"--reward f failed in its trial, on all rows that were tried (2): {said}")
    assert warning.endswith("; check that it works for other completions than 'a', 'bb'")


def test_state_that_a_function_keeps_of_its_trial_reaches_no_group(tmp_path):
    file = write(tmp_path, """
        calls = []
        def f(completions, **columns):
            calls.append(1)
            return [float(len(calls))] * len(completions)
    """)  # fmt: skip
    [result] = score([f"{file}:f"], request(), trials=[request()], num_workers=1)
    assert result.rewards == [1.0, 1.0]


def test_a_value_for_failures_lets_a_function_pass_its_trial_which_is_said(tmp_path, caplog):
    file = write(tmp_path, "def f(completions, answer): ...")
    [result] = score([f"{file}:f"], request(gold="42"), trials=[request(gold="42")], on_error=-1.0)
    assert result.rewards == [-1.0, -1.0]
    assert "--reward f: it asks for answer" in caplog.text
