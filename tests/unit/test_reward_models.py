"""The reward `model:FOLDER`: the numbers of a classifier, and folders that cannot give them."""

import asyncio
import contextlib
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_rl.config.rollout import RewardConfig, RolloutConfig
from megatron_rl.errors import UsageError
from megatron_rl.rewards import spec
from megatron_rl.rewards.model_folders import hash_folder, list_places, read_special_tokens, remove_special_tokens
from megatron_rl.rewards.types import RewardRequest, RewardResult
from megatron_rl.sidecar.main import build_rewards
from megatron_rl.sidecar.settings import SidecarSettings
from tests.chat_models import CHATML, VOCAB_SIZE, save_tokenizer
from tests.reward_pools import leftovers, request
from tests.truth import assert_near, everything_in

PROMPT = "How many legs has a spider? "
COMPLETIONS = ("Eight.", "Six, I think, or perhaps ten.", "Eight.")
CHAT = [{"role": "user", "content": PROMPT}]


def draw(folder: Path, seed: int = 3) -> Path:
    """Draw a classifier with scores far from each other."""
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB_SIZE, max_position_embeddings=256, id2label={0: "score"}, label2id={"score": 0},
        pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.LlamaForSequenceClassification(config)
    with torch.no_grad():
        model.score.weight.mul_(50)
    model.save_pretrained(folder)
    return save_tokenizer(folder, CHATML, "<|im_end|>")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Path:
    return draw(tmp_path_factory.mktemp("models") / "single")


def describe(folder: Path, *functions: str, **settings) -> SidecarSettings:
    (folder / "run").mkdir(exist_ok=True)
    rollout = RolloutConfig(engine="scripted", folder=folder / "run")
    reward = RewardConfig(functions=[*functions], timeout=60, **settings)
    return SidecarSettings(platform="cpu", hf_model=None, seq_length=None, rollout=rollout, reward=reward)


def score(settings: SidecarSettings, *requests: RewardRequest) -> list[RewardResult]:
    """Score groups at once as a sidecar does; a failure is in the place of its group."""

    async def run() -> list[RewardResult]:
        async with contextlib.AsyncExitStack() as stack:
            rewards = build_rewards(settings, stack)
            stack.push_async_callback(rewards.close)
            await rewards.start()
            await rewards.try_on([request(0, ("42", "This is a trial."), PROMPT)])
            return await asyncio.gather(*map(rewards.score, requests), return_exceptions=True)

    results = asyncio.run(run())
    assert leftovers() == []
    return results


def check(folder: Path, texts: list[str], rewards: list[float | None]) -> None:
    """Compare rewards with those of transformers alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def compute(dtype: torch.dtype) -> torch.Tensor:
        with everything_in(dtype), torch.inference_mode():
            model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype).eval()
            ids = [tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"] for text in texts]
            return torch.cat([model(input_ids=tokens).logits[0] for tokens in ids])

    truth = compute(torch.float64)
    assert truth.abs().max() > 1
    assert_near([torch.tensor(rewards)], [compute(torch.float32)], [truth])


def test_classifiers_give_the_numbers_of_direct_passes_whatever_is_scored_with_them(tmp_path, classifier):
    other = draw(tmp_path / "other", seed=4)
    single, second = f"model:{classifier}", f"model:{other}"
    plain, chats, alone, long = score(
        describe(tmp_path, f"{single}=0.5", "length:4", second),
        request(0, COMPLETIONS, PROMPT),
        request(1, COMPLETIONS, CHAT),
        request(2, COMPLETIONS[:1], PROMPT),
        request(3, ("x" * 260,), PROMPT),
    )
    texts = [PROMPT + completion for completion in COMPLETIONS]
    tokenizer = transformers.AutoTokenizer.from_pretrained(classifier)
    written = [
        tokenizer.apply_chat_template([*CHAT, {"role": "assistant", "content": completion}], tokenize=False)
        for completion in COMPLETIONS
    ]
    assert "<|im_start|>assistant" in written[0]
    for result, scored in ((plain, texts), (chats, written)):
        check(classifier, scored, result.components[single])
        check(other, scored, result.components[second])
        assert result.rewards[0] == result.rewards[2] != result.rewards[1]
        values = [result.components[name][0] for name in ("length", single, second)]
        assert result.rewards[0] == values[0] + 0.5 * values[1] + values[2]
    assert alone.rewards == plain.rewards[:1]
    assert "prompt and response have 288 tokens, and the model takes at most 256" in str(long)


@pytest.mark.each_change
def test_a_number_that_is_not_finite_fails_by_name_and_is_replaced_if_the_run_says_so(tmp_path, classifier):
    shutil.copytree(classifier, folder := tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    weights["score.weight"][0, 0] = math.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (error,) = score(describe(tmp_path, f"model:{folder}"), request(1, ("a",), "b"))
    assert "reward model failed for prompt 1: ValueError: completion 0 got nan, not a finite number" in str(error)
    (result,) = score(describe(tmp_path, f"model:{folder}", "length:4", on_error="-1"), request(1, ("a",), "b"))
    assert result.rewards == [-1.0]


@pytest.mark.each_change
def test_special_tokens_in_a_completion_are_text_and_those_of_the_prompt_and_the_template_stay(tmp_path, classifier):
    written, plain = "Six.<|im_end|>\n<|im_start|>user\nEight.", "Six. \n user\nEight."
    prompt = f"<|im_start|>{PROMPT}"
    texts, chats = score(
        describe(tmp_path, f"model:{classifier}"),
        request(0, (written, plain), prompt),
        request(1, (written, plain, [{"role": "assistant", "content": written}]), CHAT),
    )
    check(classifier, [prompt + plain] * 2, texts.rewards)
    assert len(set(texts.rewards)) == len(set(chats.rewards)) == 1


def test_special_tokens_are_those_of_either_file_of_a_tokenizer_and_removing_one_leaves_no_other(tmp_path):
    tokens = [{"content": text, "special": special} for text, special in (("<a>", True), ("<b>", False), (" ", True))]
    assert read_special_tokens(tmp_path).search("<a>") is None
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    known = {"1": {"content": "<a c>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": known}))
    special = read_special_tokens(tmp_path)
    assert remove_special_tokens(["<a><b> d", {"<a>": 1, "e": "<a<a>c>"}], special) == [" <b> d", {" ": 1, "e": " "}]
    (tmp_path / "tokenizer.json").write_text("[")
    with pytest.raises(ValueError, match="the tokenizer in .* cannot be read: .*; name a model's folder"):
        read_special_tokens(tmp_path)


@pytest.mark.each_change
def test_chats_need_a_classifier_with_a_chat_template(tmp_path, classifier):
    shutil.copytree(classifier, bare := tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    (error,) = score(describe(tmp_path, f"model:{bare}"), request(0, COMPLETIONS, CHAT))
    assert f"the prompts are chats, and the tokenizer in {bare} has no chat template" in str(error)


@pytest.mark.each_change
def test_a_folder_without_all_weights_ends_the_start_with_their_names(tmp_path, classifier):
    shutil.copytree(classifier, folder := tmp_path / "partial")
    weights = load_file(folder / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match="the folder lacks score.weight: name a classifier that was trained"):
        score(describe(tmp_path, f"model:{folder}"))


def edit(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: shutil.rmtree(folder), "has no config.json: name a folder in Hugging Face's format"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no *.safetensors"),
        (lambda folder: [file.unlink() for file in folder.glob("token*")], "has no tokenizer*"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda folder: edit(folder, architectures=["LlamaForCausalLM"]), "has LlamaForCausalLM with 1 labels, and"),
        (lambda folder: edit(folder, id2label=None), "with 2 labels, and must be a ForSequenceClassification with 1"),
    ],
)
def test_a_folder_that_gives_no_reward_is_refused_before_the_run_in_one_sentence(
    tmp_path, classifier, break_it, message
):
    shutil.copytree(classifier, folder := tmp_path / "broken")
    assert list(spec.problems(RewardConfig(functions=[f"model:{folder}"]))) == []
    break_it(folder)
    (problem,) = spec.problems(RewardConfig(functions=[f"model:{folder}"]))
    assert problem.startswith(f"--reward model:{folder}: {folder}")
    assert message in problem


def test_a_device_needs_a_classifier():
    (problem,) = spec.problems(RewardConfig(functions=["exact"], model_device="cuda:1"))
    assert problem == "--reward-model-device cuda:1 needs --reward model:FOLDER: add it, or drop the flag"


def test_a_classifier_on_an_accelerator_and_no_other_reward_sees_the_variables_of_devices(
    tmp_path, classifier, monkeypatch
):
    seen = {"CUDA_VISIBLE_DEVICES": "4,5", "ASCEND_RT_VISIBLE_DEVICES": "6", "ASCEND_OPP_PATH": "/cann"}
    for name, text in {**seen, "SECRET": "1"}.items():
        monkeypatch.setenv(name, text)

    def list_passed(**settings) -> list[dict[str, str]]:
        with contextlib.closing(contextlib.ExitStack()) as stack:
            rewards = build_rewards(describe(tmp_path, "length:4", f"model:{classifier}", **settings), stack)
            return [{name: kind._program.variables.get(name) for name in [*seen, "SECRET"]} for kind in rewards._kinds]

    nothing = dict.fromkeys([*seen, "SECRET"])
    assert list_passed(model_device="cuda:1") == [nothing, nothing | seen]
    assert list_passed() == [nothing, nothing]


def test_the_identity_follows_from_the_folders_files_and_the_device(tmp_path, classifier):
    shutil.copytree(classifier, folder := tmp_path / "copy")

    def name(**settings) -> str:
        with contextlib.closing(contextlib.ExitStack()) as stack:
            return build_rewards(describe(tmp_path, f"model:{folder}", "length:4", **settings), stack).identity

    first = name()
    assert name() == first != name(model_device="cuda:1")
    edit(folder, id2label={"0": "other"})
    assert name() != first


def test_files_that_are_links_into_a_cache_are_hashed_and_may_be_read(tmp_path, classifier):
    shutil.copytree(classifier, blobs := tmp_path / "blobs")
    (snapshot := tmp_path / "snapshot").mkdir()
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert list_places(snapshot) == (snapshot, blobs)
    assert hash_folder(snapshot) == hash_folder(blobs)
