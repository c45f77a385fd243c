"""The values of --reward, the ready-made rewards, verl's functions."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from megatron_rl.errors import InputError, UsageError
from megatron_rl.rewards.ready_made import REWARDS, find_number
from megatron_rl.rewards.spec import parse_on_error, parse_spec, parse_specs
from megatron_rl.rewards.types import RewardRequest, RewardSpec, check_values
from megatron_rl.rewards.verl import from_verl


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("gsm8k", RewardSpec("gsm8k", "gsm8k")),
        ("gsm8k=0.5", RewardSpec("gsm8k", "gsm8k", weight=0.5)),
        ("exact:target=2@5", RewardSpec("exact", "exact", argument="target", weight=2.0, timeout=5.0)),
        ("dir/my.py:fn=-1e-1", RewardSpec("fn", "dir/my.py", "fn", weight=-0.1)),
        ("my.py:fn@0.5", RewardSpec("fn", "my.py", "fn", timeout=0.5)),
        ("regex:^a=b$", RewardSpec("regex", "regex", argument="^a=b$")),
        ("regex:x=1=0.5", RewardSpec("regex", "regex", argument="x=1", weight=0.5)),
        ("http://h:80/score?a=b=1", RewardSpec("http", "http", argument="http://h:80/score?a=b", weight=1.0)),
    ],
)
def test_a_reward_is_written_as_source_weight_and_limit(text, spec):
    assert parse_spec(text) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("gsm9k", "the nearest is gsm8k"),
        ("gsm8k=nan", "must be FILE.py:FUNCTION or"),
        ("my.py", "write my.py:FUNCTION"),
        ("my.py:fn=heavy", "'fn=heavy' must be the name of a function"),
        ("my.py:fn=1e999", "weight must be finite"),
        ("my.py:fn@0", "must be finite and above 0"),
        ("regex:(", "not a regular expression"),
        ("length", "write length:LIMIT"),
        ("length:0", "write length:LIMIT"),
        ("format:a b", "not the name of a tag"),
        ("http", "the address of the reward model"),
    ],
)
def test_a_reward_that_is_written_wrong_is_refused_with_what_to_write(text, message):
    with pytest.raises(UsageError, match=message):
        parse_spec(text)


def test_a_failure_stops_the_run_or_counts_as_a_finite_number():
    assert parse_on_error("stop") is None
    assert parse_on_error("-1") == -1.0
    for text in ("nan", "1e999", "go on"):
        with pytest.raises(UsageError, match="must be stop or a finite number"):
            parse_on_error(text)


def test_functions_of_one_name_are_told_apart_by_their_sources_and_one_given_twice_is_refused():
    assert [spec.name for spec in parse_specs(["a.py:fn", "b.py:fn", "exact"])] == ["a.py:fn", "b.py:fn", "exact"]
    assert [spec.name for spec in parse_specs(["exact", "exact:b"])] == ["exact", "exact:b"]
    with pytest.raises(UsageError, match="given 2 times"):
        parse_specs(["a.py:fn", "a.py:fn=2"])


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7.\n#### 7", 7),
        ("#### 1,234.50 dollars, not 9", 1234.5),
        ("#### $-3", -3),
        (r"It is \boxed{42.0}, of 50", 42),
        ("first 5, then 18.", 18),
        ("The total is $1,000,000.", 1000000),
        ("#### none", None),
        ("no number", None),
        ("minus -.5", -0.5),
    ],
)
def test_gsm8k_takes_the_number_after_the_marks_or_in_the_box_or_the_last(text, number):
    assert find_number(text) == number


@pytest.mark.parametrize(
    ("spec", "completion", "columns", "value"),
    [
        ("gsm8k", "it is 72", {"answer": "48 + 24\n#### 72"}, 1.0),
        ("gsm8k", "it is 71", {"answer": "48 + 24\n#### 72"}, 0.0),
        ("gsm8k:gold", "nothing", {"gold": 72}, 0.0),
        ("exact", " yes\n", {"answer": "yes"}, 1.0),
        ("exact", "yes!", {"answer": "yes"}, 0.0),
        (r"regex:a.b\d", "xa\nb4", {}, 1.0),
        ("regex:^b", "ab", {}, 0.0),
        ("format", "<think>a</think>\n<answer>b</answer>", {}, 1.0),
        ("format", "<think>a</think><think>a</think><answer>b</answer>", {}, 0.0),
        ("format", "<answer>b</answer><think>a</think>", {}, 0.0),
        ("format", "so <think>a</think><answer>b</answer>", {}, 0.0),
        ("format:plan,code", "<plan></plan> <code>x</code>", {}, 1.0),
        ("length:4", "abcd", {}, 0.0),
        ("length:4", "abcdef", {}, -0.5),
        ("length:4,8", "abcdef", {}, -0.25),
        ("length:4", "a" * 99, {}, -1.0),
    ],
)
def test_ready_made_rewards_give_what_their_page_says(spec, completion, columns, value):
    assert called(spec, [completion], columns) == [value]
    assert called(spec, [[{"role": "assistant", "content": completion}]], columns, ids=len(completion)) == [value]


def test_a_column_that_is_missing_is_named_with_those_there_are():
    with pytest.raises(
        ValueError, match=r"no column answer \(it has solution\): write --answer-key .* --reward gsm8k:C"
    ):
        called("gsm8k", ["1"], {"solution": "1"})
    with pytest.raises(ValueError, match="column answer holds no number"):
        called("gsm8k", ["1"], {"answer": "none"})


def test_math_judges_by_meaning_and_does_not_apply_if_the_solution_is_not_mathematics():
    pytest.importorskip("math_verify")
    assert called("math", [r"so $\boxed{\frac{1}{2}}$"], {"solution": "$0.5$"}) == [1.0]
    assert called("math", [r"so $\boxed{x+1}$"], {"solution": r"$1+x$"}) == [1.0]
    assert called("math", ["the answer is 3"], {"solution": "4"}) == [0.0]
    assert called("math:gold", ["3"], {"gold": ""}) == [None]


def test_a_function_written_for_verl_runs_with_one_line():
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        assert (data_source, extra_info) == ("gsm8k", {"index": 3})
        return {"score": float(solution_str == ground_truth), "acc": 1}

    row = {"data_source": ["gsm8k"] * 2, "extra_info": [{"index": 3}] * 2}
    reward = from_verl(compute_score)
    assert asyncio.run(reward(["1", "2"], **row, reward_model=[{"ground_truth": "1"}] * 2)) == [1.0, 0.0]
    assert asyncio.run(reward(["1", "2"], **row, ground_truth=["2", "2"])) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (3.0, "returned float, not a list"),
        ([1.0], "returned 1 rewards for 2 completions"),
        ([1.0, "x"], r"completion 1 got 'x' \(str\), not a number"),
        ([float("nan"), 1.0], "completion 0 got nan, not a finite number"),
        ([1.0, float("-inf")], "completion 1 got -inf"),
        ([10**400, 1.0], "completion 0 got 1000"),
    ],
)
def test_a_reward_that_returns_anything_but_a_list_of_finite_numbers_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        check_values(values, 2)


def test_numbers_of_any_type_are_accepted_and_none_is_kept():
    import numpy as np

    assert check_values([True, None], 2) == [1.0, None]
    assert check_values(np.float32([0.5, 2]), 2) == [0.5, 2.0]
    assert check_values((np.int64(3), 1), 2) == [3.0, 1.0]


def test_a_request_that_does_not_fit_is_refused_by_name():
    with pytest.raises(InputError, match="prompt 7: rename the columns prompts"):
        RewardRequest(7, "p", ["a"], [[1]], {"prompts": 1}).encode()
    with pytest.raises(InputError, match="1 completions with 2 lists of ids"):
        RewardRequest(7, "p", ["a"], [[1], [2]]).encode()
    with pytest.raises(InputError, match="as JSON"):
        RewardRequest(7, "p", ["a"], [[1]], {"picture": b"x"}).encode()


def test_a_group_of_many_tokens_reaches_rewards_whole_and_its_numbers_not_one_by_one(monkeypatch):
    ids = [list(range(4096)) for _ in range(16)]
    texts, dumped = ["\ud800 é"] * 16, []
    dumps = json.dumps
    monkeypatch.setattr(
        "megatron_rl.rewards.types.json.dumps", lambda content: dumped.append(dumps(content)) or dumped[-1]
    )
    line = RewardRequest(7, "p", texts, ids, {"answer": float("inf")}).encode()
    assert json.loads(line) == {
        "prompt": "p", "completions": texts, "completion_ids": ids, "columns": {"answer": float("inf")},
    }  # fmt: skip
    # json makes a Python object for every number, and the event loop waits for it.
    assert sum(map(len, dumped)) < 1000


@pytest.fixture
def remote():
    """Start a reward model that gives the `answers` one after the other, and keeps the requests."""

    class Handler(BaseHTTPRequestHandler):
        answers, asked = [], []

        def do_POST(self):
            self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            code, body = self.answers.pop(0)
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    Handler.url = f"http://127.0.0.1:{server.server_port}/"
    yield Handler
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_remote_reward_model_is_asked_once_a_group_and_again_only_after_its_own_errors(remote):
    remote.answers[:] = [(503, b""), (200, b'{"rewards": [0.25, null]}'), (200, b"[1, 2]"), (404, b""), (200, b"what")]
    assert called(remote.url, ["a", "b"], {"answer": "x"}) == [0.25, None]
    assert len(remote.asked) == 2
    assert remote.asked[0]["completions"] == ["a", "b"]
    assert remote.asked[0]["columns"] == {"answer": ["x", "x"]}
    assert called(remote.url, ["a", "b"], {}) == [1, 2]
    with pytest.raises(RuntimeError, match="answered 404"):
        called(remote.url, ["a"], {})
    with pytest.raises(RuntimeError, match="did not answer with JSON"):
        called(remote.url, ["a"], {})
    assert remote.answers == []


def test_a_remote_reward_model_that_is_not_there_is_given_up_within_the_limit():
    with pytest.raises(RuntimeError, match=r"http://127.0.0.1:9/ did not answer: .*\(tried 1 times\)"):
        called("http://127.0.0.1:9/@0.2", ["a"], {})


def called(text, completions, columns, ids=None):
    """Return the values that a ready-made reward gives these completions."""
    spec = parse_spec(text)
    function = REWARDS[spec.source](spec.argument, spec.timeout)
    lists = {name: [value] * len(completions) for name, value in columns.items()}
    completion_ids = [list(range(len(text) if ids is None else ids)) for text in completions]
    return function(prompts=["p"] * len(completions), completions=completions, completion_ids=completion_ids, **lists)
