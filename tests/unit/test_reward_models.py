"""The reward `model:FOLDER`: the numbers of a classifier, and folders that cannot give them."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_rl.config.rollout import RewardConfig
from megatron_rl.errors import UsageError
from megatron_rl.rewards import spec
from megatron_rl.rewards.model_folders import hash_folder, list_places
from megatron_rl.rewards.pool import RewardPool
from megatron_rl.rewards.spec import list_specs
from tests.chat_models import CHATML, VOCAB_SIZE, save_tokenizer
from tests.reward_pools import request, score
from tests.truth import assert_near, everything_in

PROMPT = "How many legs has a spider? "
COMPLETIONS = ("Eight.", "Six, I think, or perhaps ten.", "Eight.")
CHAT = [{"role": "user", "content": PROMPT}]


def draw(folder: Path, labels: tuple[str, ...] = ("LABEL_0",), positions: int = 256) -> Path:
    """Draw a classifier with scores far from each other."""
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB_SIZE, max_position_embeddings=positions, id2label=dict(enumerate(labels)),
        label2id={label: number for number, label in enumerate(labels)}, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.LlamaForSequenceClassification(config)
    with torch.no_grad():
        model.score.weight.mul_(50)
    model.save_pretrained(folder)
    return save_tokenizer(folder, CHATML, "<|im_end|>")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Path:
    return draw(tmp_path_factory.mktemp("models") / "single")


@pytest.fixture(scope="module")
def labelled(tmp_path_factory) -> Path:
    return draw(tmp_path_factory.mktemp("models") / "labelled", ("bad", "good", "other"))


def compute(folder: Path, texts: list[str], dtype: torch.dtype, label: int | None = None) -> torch.Tensor:
    """Compute the rewards of whole texts with transformers alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with everything_in(dtype), torch.inference_mode():
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype).eval()
        ids = [tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"] for text in texts]
        logits = torch.cat([model(input_ids=tokens).logits for tokens in ids])
        return logits[:, 0] if label is None else logits.softmax(-1)[:, label]


def check(folder: Path, texts: list[str], rewards: list[float | None], label: int | None = None) -> None:
    truth, other = (compute(folder, texts, dtype, label) for dtype in (torch.float64, torch.float32))
    assert truth.abs().max() > 1e-2
    assert_near([torch.tensor(rewards)], [other], [truth])


def test_classifiers_give_the_numbers_of_direct_passes_whatever_is_scored_with_them(classifier, labelled):
    """Score texts and chats with a classifier of one number, one of labels, and a function."""
    specs = [f"model:{classifier}=0.5", f"model:{labelled}:good", "length:4"]
    single, good = f"model:{classifier}", f"model:{labelled}:good"
    plain, chats, alone, long = score(
        specs,
        request(0, COMPLETIONS, PROMPT),
        request(1, COMPLETIONS, CHAT),
        request(2, COMPLETIONS[:1], PROMPT),
        request(3, ("x" * 260,), PROMPT),
        timeout=60,
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
        check(labelled, scored, result.components[good], label=1)
        first, second, third = result.rewards
        assert first == third != second
        values = [result.components[name][0] for name in (single, good, "length")]
        assert first == 0.5 * values[0] + values[1] + values[2]
    assert alone.rewards == plain.rewards[:1]
    assert "prompt and response have 288 tokens, and the model of" in str(long)


def test_a_number_that_is_not_finite_fails_by_name_and_is_replaced_if_the_run_says_so(tmp_path, classifier):
    shutil.copytree(classifier, folder := tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    weights["score.weight"][0, 0] = math.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (error,) = score([f"model:{folder}"], request(1, ("a",), "b"), timeout=60)
    assert "reward model failed for prompt 1: ValueError: completion 0 got nan, not a finite number" in str(error)
    (result,) = score([f"model:{folder}"], request(1, ("a",), "b"), timeout=60, on_error=-1.0)
    assert result.rewards == [-1.0]


def test_the_trial_ends_a_start_whose_rows_no_classifier_could_read(tmp_path, classifier):
    shutil.copytree(classifier, bare := tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    trial = request(0, ("42", "This is a trial."), CHAT)
    with pytest.raises(UsageError, match="the prompts are chats, and the tokenizer of .* has no chat template"):
        score([f"model:{bare}"], timeout=60, trials=[trial])


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: shutil.rmtree(folder), "has no config.json: name a folder in Hugging Face's format"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"has no \*.safetensors"),
        (lambda folder: [file.unlink() for file in folder.glob("token*")], "has no tokenizer.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda folder: edit(folder, architectures=["LlamaForCausalLM"]), "has LlamaForCausalLM, and must have"),
        (lambda folder: edit(folder, id2label=None, num_labels=2), "has 2 labels, and a reward is one: write model:"),
    ],
)
def test_a_folder_that_gives_no_reward_is_refused_before_the_run_in_one_sentence(
    tmp_path, classifier, break_it, message
):
    shutil.copytree(classifier, folder := tmp_path / "broken")
    break_it(folder)
    with pytest.raises(ValueError, match=message):
        raise ValueError(*find_problems(f"model:{folder}"))


def find_problems(text: str, **settings) -> list[str]:
    found = list(spec.problems(RewardConfig(functions=[text], **settings)))
    assert len(found) <= 1
    return found


def edit(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_a_label_must_be_one_of_the_classifiers(labelled):
    (problem,) = find_problems(f"model:{labelled}:god")
    assert f"has no label god: write model:{labelled}:LABEL with one of bad, good, other" in problem
    assert find_problems(f"model:{labelled}:good") == []


def test_a_device_must_be_known_and_cannot_be_confined(classifier):
    (problem,) = find_problems(f"model:{classifier}", model_device="gpu")
    assert "--reward-model-device gpu must be cpu, or a device such as cuda:1" in problem
    (problem,) = find_problems(f"model:{classifier}", model_device="cuda:0", confine="require")
    assert "--reward-model-device cuda:0: a process on an accelerator cannot be confined" in problem


def test_a_folder_without_all_weights_ends_the_start_with_their_names(tmp_path, classifier):
    shutil.copytree(classifier, folder := tmp_path / "partial")
    weights = load_file(folder / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match="lacks the weights score.weight: name a classifier that was trained"):
        score([f"model:{folder}"], timeout=60)


def test_the_identity_follows_from_the_folders_files_and_the_device(tmp_path, classifier):
    shutil.copytree(classifier, folder := tmp_path / "copy")

    def name(**settings) -> str:
        return RewardPool(list_specs(RewardConfig(functions=[f"model:{folder}"], **settings))).identity

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
    (result,) = score([f"model:{snapshot}"], request(0, ("a", "b"), "p"), timeout=60, confine="require")
    assert len(set(result.rewards)) == 2
