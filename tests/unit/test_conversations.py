"""Conversations: the tokens that each turn is sampled after, seeds, limits, and the turns of chat templates."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import transformers

from megatron_rl.confined.process import CallFailed, ProcessEnded
from megatron_rl.environments.types import Description, OnError
from megatron_rl.errors import MegatronRLError
from megatron_rl.gateway.chats import NumberChats, TemplateChats
from megatron_rl.shared.chat import ChatWriter
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.selection import has_signal
from megatron_rl.shared.protocol.turns import ENVIRONMENT, find_span_problems, mask_sampled
from megatron_rl.sidecar.conversations import Conversations
from megatron_rl.sidecar.engines import GroupRequest
from tests import chat_models
from tests.turns import make_turn

PROMPT = wire.Prompt(index=4, row="rows:4", tokens=wire.encode_tokens([7, 8]), text="7 8", columns={"answer": "3"})
REQUEST = GroupRequest("run-1-4", (7, 8), 2, 100, wire.Sampling(max_tokens=12, max_turns=3), prompt=4)


class Engines:
    """Engines that say two tokens, the seed's last digits first; the engine changes with every turn."""

    def __init__(self, ends: Sequence[str] = (), fingerprints: Sequence[str] = ()) -> None:
        self.requests: list[GroupRequest] = []
        self._ends = list(ends)
        self._fingerprints = list(fingerprints)

    async def generate(self, request: GroupRequest) -> list[wire.Response]:
        self.requests.append(request)
        tokens = [len(request.prompt_tokens), request.seed % 50]
        end = self._ends.pop(0) if self._ends else "stop"
        fingerprint = self._fingerprints.pop(0) if self._fingerprints else "weights-1"
        engine = f"engine-{len(request.prompt_tokens) % 2}"
        return [make_turn(tokens, seed=request.seed, engine=engine, finish_reason=end, fingerprint=fingerprint)]


class Talk:
    """A conversation with an environment that says what it is told to."""

    def __init__(self, opening: str | None, answers: Sequence[Any]) -> None:
        self.opening = opening
        self.turn_rewards: list[float] = []
        self.heard: list[str] = []
        self._answers = list(answers)

    async def step(self, completion: str) -> str | None:
        self.heard.append(completion)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, tuple):
            answer, reward = answer
            self.turn_rewards.append(reward)
        return answer

    async def get_reward(self) -> float:
        return 10.0 + len(self.heard)


class Pool:
    """A pool whose conversations are given, one after the other."""

    def __init__(self, *talks: Talk) -> None:
        self.talks = list(talks)
        self.held: list[tuple[Any, int, bool]] = []

    @contextlib.asynccontextmanager
    async def hold(self, row, seed: int, is_alone: bool = False, note=lambda call: lambda: None):
        self.held.append((row, seed, is_alone))
        yield self.talks[len(self.held) - 1]


ZERO = OnError(reward=0.0)


def hold(
    engines: Engines, pool: Pool, on_error: OnError = ZERO, size: int = 1, has_reward: bool = True
) -> list[wire.Response]:
    conversations = Conversations(engines, pool, NumberChats(), on_error, Description("Talk", has_reward))  # type: ignore[arg-type]
    request = GroupRequest(**{**vars(REQUEST), "group_size": size})
    return [one.response for one in asyncio.run(conversations.hold_group(request, PROMPT))]


def test_each_turn_is_sampled_after_all_that_was_said_and_with_a_seed_of_its_own() -> None:
    engines, talk = Engines(), Talk("9", ["20 21", "22", None])
    (response,) = hold(engines, Pool(talk))
    first, second, third = engines.requests
    assert list(first.prompt_tokens) == [7, 8, 9]
    assert list(second.prompt_tokens) == [7, 8, 9, 3, 0, 20, 21]
    assert third.prompt_tokens[:7] == second.prompt_tokens
    assert [one.sampling.max_tokens for one in engines.requests] == [11, 7, 4]
    assert len({one.seed for one in engines.requests}) == 3
    assert [one.after for one in engines.requests] == [None, "engine-1", "engine-1"]
    assert len({one.request_id for one in engines.requests}) == 3
    tokens = wire.decode_tokens(response.tokens)
    assert [7, 8, *tokens[:-2]] == list(third.prompt_tokens)
    assert tokens[~mask_sampled(response)].tolist() == [9, 20, 21, 22]
    log_probs = wire.decode_log_probs(response.log_probs)
    assert log_probs.tolist() == [0, -1, -2, 0, 0, -1, -2, 0, -1, -2]
    assert talk.heard == ["3 0", f"7 {second.seed % 50}", f"10 {third.seed % 50}"]
    assert list(find_span_problems(response, "1", 3, 2)) == []
    assert [(span.version, span.engine) for span in response.spans] == [
        (ENVIRONMENT, ""), ("1", "engine-1"), (ENVIRONMENT, ""), ("1", "engine-1"), (ENVIRONMENT, ""), ("1", ""),
    ]  # fmt: skip
    assert (response.engine, response.seed, response.finish_reason) == ("engine-0", 100, "stop")
    assert (response.reward, response.components) == (13.0, {"environment": 13.0})


@pytest.mark.parametrize("fingerprints", [["weights-0", "weights-1"], ["weights-1", "weights-0"]])
def test_a_turn_under_other_weights_is_seen_in_the_response(fingerprints: Sequence[str]) -> None:
    (response,) = hold(Engines(fingerprints=fingerprints), Pool(Talk(None, ["20", None])))
    assert response.fingerprint == fingerprints[0]


def test_a_group_has_a_conversation_of_its_own_for_each_response() -> None:
    pool = Pool(Talk(None, [None]), Talk(None, [None]))
    first, second = hold(Engines(), pool, size=2)
    assert (first.seed, second.seed) == (100, 101)
    assert first.tokens != second.tokens
    assert pool.held == [({"answer": "3", "prompt": "7 8"}, seed, False) for seed in (100, 101)]


@pytest.mark.parametrize(
    ("ends", "answers", "reason", "num_tokens"),
    [
        (["stop", "length"], ["20", "unused"], "length", 5),
        ([], ["20", "21", "22"], "limit", 8),
        # What the environment says would leave no token for an answer.
        ([], [" ".join(["20"] * 10)], "limit", 2),
        ([], [" ".join(["20"] * 9), None], "stop", 13),
    ],
)
def test_a_conversation_ends_at_its_limits(ends, answers, reason: str, num_tokens: int) -> None:
    (response,) = hold(Engines(ends), Pool(Talk(None, answers)))
    assert (response.finish_reason, len(response.tokens) // 4) == (reason, num_tokens)
    assert response.spans[-1].version == "1"


def test_rewards_of_turns_are_added_to_the_reward_and_a_turn_without_an_answer_has_none() -> None:
    (response,) = hold(Engines(), Pool(Talk(None, [("20", 0.5), ("21", -1.0), (None, 2.0)])))
    assert response.turn_rewards == [0.5, -1.0, 2.0]
    assert (response.reward, response.components) == (13.0 + 1.5, {"environment": 14.5})
    (response,) = hold(Engines(["stop", "length"]), Pool(Talk(None, [("20", 0.5)])))
    assert (response.turn_rewards, response.reward) == ([0.5, 0.0], 11.5)
    # Without a word between them, two turns are one.
    (response,) = hold(Engines(), Pool(Talk(None, [("", 0.5), ("21", -1.0), (None, 2.0)])))
    assert (response.turn_rewards, response.reward) == ([-0.5, 2.0], 14.5)
    # A failure has the reward for failures, and nothing of its turns.
    (response,) = hold(Engines(), Pool(Talk(None, [("20", 0.5), CallFailed("no")])), on_error=OnError(reward=-1.0))
    assert (response.turn_rewards, response.reward) == ([], -1.0)


def test_an_environment_that_rewards_turns_alone_gives_a_conversation_without_any_0() -> None:
    rewarded, plain = hold(
        Engines(), Pool(Talk(None, [("20", 0.5), None]), Talk(None, [None])), size=2, has_reward=False
    )
    assert (rewarded.reward, rewarded.components) == (0.5, {"environment": 0.5})
    assert (plain.reward, plain.components) == (0.0, {"environment": 0.0})
    plan = wire.Plan(num_prompts=1, group_size=2, num_replicas=1, micro_batch_size=2, deciding_rewards=["environment"])
    assert has_signal([rewarded, plain], plan)


def test_a_failure_has_its_reward_or_fails_the_group_by_name() -> None:
    (response,) = hold(Engines(), Pool(Talk(None, ["20", CallFailed("no such move")])), on_error=OnError(reward=-1.0))
    assert (response.finish_reason, response.reward, len(response.tokens) // 4) == ("failed", -1.0, 5)
    assert response.failure == "no such move"
    with pytest.raises(MegatronRLError, match=r"the environment of prompt 4 \(rows:4\) failed: no such move"):
        hold(Engines(), Pool(Talk(None, ["20", CallFailed("no such move")])), on_error=OnError(stops=True))
    # Nothing was said that could have a reward.
    (response,) = hold(Engines(), Pool(Talk(" ".join(["9"] * 12), [])))
    assert (response.reward, response.tokens) == (None, b"")
    assert response.failure == "its first words take 12 tokens, and a response may have 12"


def test_a_conversation_that_others_ended_is_held_again_and_one_that_may_be_the_cause_alone() -> None:
    ended, suspected = (
        ProcessEnded("its process ended", had_call=False),
        ProcessEnded("its process ended", had_call=True),
    )
    pool = Pool(Talk(None, [ended]), Talk(None, [suspected]), Talk(None, ["20", None]))
    (response,) = hold(Engines(), pool)
    assert response.finish_reason == "stop"
    assert [is_alone for _, _, is_alone in pool.held] == [False, False, True]
    # However often others end it, they end no run: at last it is alone.
    pool = Pool(*(Talk(None, [ended]) for _ in range(7)), Talk(None, ["20", None]))
    (response,) = hold(Engines(), pool)
    assert response.finish_reason == "stop"
    assert [is_alone for _, _, is_alone in pool.held] == [*[False] * 7, True]
    pool = Pool(Talk(None, [suspected]), Talk(None, [suspected]))
    (response,) = hold(Engines(), pool, on_error=OnError(reward=-1.0))
    assert (response.finish_reason, response.reward) == ("failed", -1.0)


@pytest.mark.parametrize(
    ("template", "end"),
    [(chat_models.CHATML, "<|im_end|>"), (chat_models.LLAMA_3, "<|eot_id|>"), (chat_models.PHI_3, "<|end|>")],
    ids=["ChatML", "Llama 3", "Phi 3"],
)
def test_a_conversation_has_the_tokens_that_the_template_gives_the_whole_chat(
    tmp_path, template: str, end: str
) -> None:
    texts = TemplateChats.load(str(chat_models.save_tokenizer(tmp_path, template, end)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    chat = [{"role": "user", "content": "2 + 3"}]
    head, _ = ChatWriter(tokenizer).write_prompt(chat)
    prompt = wire.Prompt(index=0, row="", tokens=b"", text=chat)
    said, answered = [*tokenizer.encode("5"), chat_models.find(end)], "and 4"
    whole = [
        {"role": "user", "content": "2 + 3, please"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": answered},
    ]
    tokens = tokenizer.encode(head, add_special_tokens=False) + texts.open(prompt, ", please") + said
    tokens += texts.follow(prompt, whole[2:], said, ())
    rendered = tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
    assert tokens == tokenizer.encode(rendered, add_special_tokens=False)
    assert texts.decode(said) == "5"
    # A turn that another token ended keeps it, and the template's end follows.
    assert texts.follow(prompt, whole[2:], [0], ())[0] == chat_models.find(end)
