"""The turns of conversations in samples and on the page of the report."""

import json

import msgspec

from megatron_rl.analysis.report import rollouts
from megatron_rl.analysis.report.rollouts import SampleFile
from megatron_rl.observe.samples import SampledGroup, SampledPlace, SampledResponse, SampledTurn, SamplesFile
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.turns import ENVIRONMENT, Turn, list_turns
from megatron_rl.trainer.loop.reporter import sample_turns
from tests.unit.test_turns import respond


def decode(sequences):
    return [" ".join(map(str, tokens)) for tokens in sequences]


# After a prompt of 3 tokens: 10 11 | 50 51 | 12, then from within the first turn 13, and from the prompt 52 | 14 15.
TREE = respond(
    ("3", [10]), ("3", [11]), (ENVIRONMENT, [50, 51]), ("3", [12]), ("3", [13]), (ENVIRONMENT, [52]), ("3", [14, 15]),
    branches=[wire.Branch(start=5, after=1), wire.Branch(start=6, after=0)],
    turn_rewards=[0.5, 0.0, -1.0, 2.0],
)  # fmt: skip


def test_turns_are_runs_of_one_writer_that_no_branch_interrupts():
    assert list_turns(TREE) == [
        Turn(0, 2, False), Turn(2, 4, True), Turn(4, 5, False), Turn(5, 6, False, 1), Turn(6, 7, True, 0),
        Turn(7, 9, False),
    ]  # fmt: skip


def test_each_turn_has_its_text_its_reward_and_the_place_that_its_branch_leaves():
    assert sample_turns(TREE, 3, decode) == [
        SampledTurn("policy", "10 11", 2, 0.5),
        SampledTurn("environment", "50 51", 2),
        SampledTurn("policy", "12", 1, 0.0),
        SampledTurn("policy", "13", 1, -1.0, SampledPlace(0, 1)),
        SampledTurn("environment", "52", 1, None, SampledPlace(-1)),
        SampledTurn("policy", "14 15", 2, 2.0),
    ]
    within_the_prompt = [wire.Branch(start=5, after=2), wire.Branch(start=6, after=-1)]
    places = [turn.after for turn in sample_turns(msgspec.structs.replace(TREE, branches=within_the_prompt), 3, decode)]
    assert places == [None, None, None, SampledPlace(0), SampledPlace(-1, 2), None]
    of_policy = [turn.advantage for turn in sample_turns(TREE, 3, decode, [4.0, 3.0, 2.0, 1.0])]
    assert of_policy == [4.0, None, 3.0, 2.0, None, 1.0]
    assert sample_turns(respond(("3", [10]), ("3", [11])), 3, decode) is None


def write(path, *turns, text="all of it"):
    with SamplesFile(path, 4) as file:
        file.write(3, [SampledGroup("row", "prompt", [SampledResponse(text, 1.0, turns=turns or None)])])


def read(path):
    file = SampleFile(path)
    file.update()
    return [response for group in file.choose()["groups"] for response in group["responses"]]


def test_a_conversation_reaches_the_page_turn_by_turn_in_place_of_its_text(tmp_path):
    path = tmp_path / "samples.jsonl"
    write(path, *sample_turns(TREE, 3, decode, [0.25, 0.5, 0.75, 1.0]))
    (shown,) = read(path)
    assert "text" not in shown
    assert (shown["num_turns"], shown["num_left_out"]) == (4, 0)
    assert shown["turns"][3] == {
        "by": "policy", "text": "13", "num_tokens": 1, "reward": -1.0, "advantage": 0.75,
        "after": {"turn": 0, "num_tokens": 1},
    }  # fmt: skip
    assert shown["turns"][1] == {"by": "environment", "text": "50 51", "num_tokens": 2}


def test_a_conversation_of_many_turns_keeps_the_first_and_long_turns_lose_their_middle(tmp_path):
    path = tmp_path / "samples.jsonl"
    long = SampledTurn("environment", "x" * 21_000, 9)
    write(path, *[long, SampledTurn("policy", "y", 1)] * rollouts.MOST_TURNS)
    (shown,) = read(path)
    assert len(shown["turns"]) == shown["num_turns"] == shown["num_left_out"] == rollouts.MOST_TURNS
    assert len(shown["turns"][0]["text"]) < rollouts.MOST_CHARACTERS + 100


def test_turns_that_are_none_leave_the_text(tmp_path):
    path = tmp_path / "samples.jsonl"
    bad = [7, [{"by": "policy"}], [{"by": "policy", "text": "a", "after": {"turn": 4}}], []]
    with path.open("w") as file:
        for turns in bad:
            response = {"text": "all of it", "reward": 1.0, "turns": turns}
            file.write(json.dumps({"version": 0, "row": "r", "prompt": "p", "responses": [response]}) + "\n")
    assert [shown.get("text") for shown in read(path)] == ["all of it"] * 4
    assert not any("turns" in shown for shown in read(path))
