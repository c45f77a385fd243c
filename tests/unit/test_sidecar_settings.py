"""The sidecar's command line, and the part of it that the trainer checks before it starts one."""

import ast
import asyncio
import contextlib
import functools
import importlib.util
import json
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.config.settings import EnvironmentConfig, RewardConfig, RolloutConfig
from megatron_rl.errors import InputError, UsageError
from megatron_rl.flag import IntegerOr
from megatron_rl.shared.protocol.wire import WIRE_VERSION
from megatron_rl.sidecar.main import _build_factory
from megatron_rl.sidecar.settings import SidecarSettings, list_flags, parse, read_settings, write_message
from megatron_rl.sidecar.starting import StartNotes
from megatron_rl.sidecar.vllm.checks import CPU_HEAD_SIZES
from megatron_rl.sidecar.vllm.factory import VllmFactory
from tests import hf_models
from tests.command_lines import without

SCRIPTED = "--rollout-engine scripted --rollout-folder /nowhere/run"
ROWS = tomllib.loads(Path(__file__).with_name("sidecar_checks.toml").read_text(encoding="utf-8"))
VLLM = "--rollout-folder /nowhere/run --reward exact --platform cpu --seq-length 64"


@pytest.fixture(scope="module")
def draw(tmp_path_factory) -> Callable[[str], Path]:
    """Return a function that writes a model once, named as "KIND" or "KIND head_dim=N"."""

    @functools.cache
    def draw(name: str) -> Path:
        kind, _, head_dim = name.partition(" head_dim=")
        changes = {"head_dim": int(head_dim)} if head_dim else {}
        return hf_models.draw(kind, tmp_path_factory.mktemp("models") / kind, **changes)

    return draw


@pytest.fixture(scope="module")
def model(draw: Callable[[str], Path]) -> Path:
    """Write a model with heads of 32 columns, 8 of queries and 4 of keys, an MLP of 96; 256 positions."""
    return draw("qwen3")


def problems(words: str) -> list[str]:
    with pytest.raises(UsageError) as raised:
        parse(words.split())
    return str(raised.value).splitlines()


def test_flags_become_settings_and_repeated_lists_are_joined(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("def g(completions): ...")
    function = f"{tmp_path}/f.py:g"
    settings = parse(f"{SCRIPTED} --reward exact=0.5 --reward {function} --rollout-num-engines 3".split())
    assert settings.reward.functions == ["exact=0.5", function]
    assert settings.rollout.num_engines == 3
    assert settings.folder == Path("/nowhere/run")
    assert settings.run == "run"
    assert settings.address == ("127.0.0.1", 0)
    script = tmp_path / "s.json"
    script.write_text("{}")
    assert parse(f"{SCRIPTED} --reward exact --rollout-script {script}".split()).rollout.script == script


@pytest.mark.parametrize("engines", ROWS)
def test_a_wrong_value_is_refused_and_the_error_says_what_to_write(engines: str, draw: Callable[[str], Path]) -> None:
    wrong = {}
    for words, message in ROWS[engines].items():
        found = problems(write_words(engines, words, draw))
        if len(found) != 1 or message not in found[0]:
            wrong[words] = found
    assert wrong == {}


@pytest.mark.parametrize(
    ("engines", "words"),
    [
        ("qwen3", "--seq-length 64"),
        ("qwen3", "--seq-length 257 --rollout-max-model-len 256"),
        ("qwen3", "--rollout-tensor-parallel-size 2 --rollout-max-model-len 256"),
        ("qwen3", f"--rollout-python {sys.executable}"),
        ("qwen3 head_dim=16", "--platform cuda"),
        ("qwen3 head_dim=16", "--rollout-engine scripted"),
        ("qwen3_5 head_dim=32", "--rollout-dtype bfloat16"),
        ("qwen3_5 head_dim=32", "--platform cuda"),
        ("gpt_oss head_dim=32", "--rollout-dtype bfloat16"),
        ("gpt_oss head_dim=32", "--rollout-dtype float16 --platform cuda"),
        ("llama_biased head_dim=32", "--rollout-max-model-len 640"),
    ],
)
def test_words_that_fit_the_model_and_the_device_are_accepted(engines: str, words: str, draw) -> None:
    assert parse(write_words(engines, words, draw).split())


def write_words(engines: str, words: str, draw: Callable[[str], Path]) -> str:
    """Return the words of a sidecar, with these in place of its own; a flag without a value is left out."""
    flags = re.split(" (?=--)", words.replace("FILE", __file__)) if words else []
    base = f"{SCRIPTED} --reward exact" if engines == "scripted" else f"{VLLM} --hf-model {draw(engines)}"
    kept = base.split()
    for flag in flags:
        # Values of a list that is written twice are joined.
        kept = kept if flag.startswith("--reward ") else without(kept, flag.split()[0])
    return " ".join([*kept, *(flag for flag in flags if " " in flag)])


@pytest.mark.parametrize(
    ("flag", "name"),
    [("--rollout-env", "environment"), ("--rollout-agent", "agent"), ("--rollout-verifiers", "agent")],
)
def test_a_function_named_as_the_reward_of_what_acts_is_refused(tmp_path: Path, flag: str, name: str) -> None:
    (tmp_path / "mine.py").write_text("def agent(completions): ...\ndef environment(completions): ...\ndef act(): ...")
    acting = "tcp://127.0.0.1:5000" if flag == "--rollout-verifiers" else f"{tmp_path}/mine.py:act"
    words = f"{SCRIPTED} {flag} {acting} --reward gsm8k {tmp_path}/mine.py:"
    found = problems(f"{words}{name}")
    assert found == [f"--reward {name} has the name of the reward that {flag} gives: rename the function"]
    assert read_settings(f"{words}{'agent' if name == 'environment' else 'environment'}".split())


def test_all_problems_are_said_at_once_one_a_line(tmp_path: Path, model: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(completions): ...")
    found = problems(
        f"--platform cpu --rollout-num-engines 0 --rollout-listen nowhere --rollout-python {tmp_path} "
        f"--reward {tmp_path}/mine.py:scores gsm9k --reward-on-error perhaps --reward-environment NO_SUCH"
    )
    expected = (
        "--rollout-folder is missing", "--rollout-num-engines 0", "--hf-model is missing",
        "--rollout-max-model-len is missing", f"--rollout-python {tmp_path}", "--rollout-listen nowhere",
        f"--reward {tmp_path}/mine.py:scores", "--reward gsm9k", "--reward-on-error perhaps",
        "--reward-environment NO_SUCH",
    )  # fmt: skip
    assert len(found) == len(expected), found
    for line, text in zip(found, expected, strict=True):
        assert line.startswith(text)
    # What a misspelt flag was meant for is not missing too.
    words = f"{VLLM} --hf-model {model} --rollout-num-engins 2 --rollout-num-threads many --rewards exact"
    unknown = problems(words.replace("--rollout-folder", "--rollout-foldr").replace("--reward exact ", ""))
    assert [line.split()[:3] for line in unknown] == [
        ["--rollout-num-threads", "many:", "not"],
        ["unknown", "flag", "--rollout-foldr"],
        ["unknown", "flag", "--rollout-num-engins"],
        ["unknown", "flag", "--rewards"],
    ]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (None, "cannot be read: [Errno 2]"),
        ("def score(completions):\n    return (", "mine.py:2 does not import: SyntaxError"),
        ("def scores(completions): ...", "mine.py has no function score; did you mean scores?"),
        ("def outer():\n    def score(completions): ...", "mine.py has no function score"),
        ("'a' + chr(0)\0", "mine.py"),
    ],
)
def test_a_reward_function_that_is_not_in_its_file_is_refused(code: str | None, message: str, tmp_path: Path) -> None:
    if code is not None:
        (tmp_path / "mine.py").write_text(code)
    found = problems(f"{SCRIPTED} --reward {tmp_path}/mine.py:score")
    assert len(found) == 1, found
    assert found[0].startswith("--reward")
    assert message in found[0]


@pytest.mark.parametrize(
    "code",
    [
        "def score(completions): ...",
        "async def score(completions): ...",
        "class score: ...",
        "from elsewhere import other as score",
        "import score.of",
        "from elsewhere import *",
        "if True:\n    score = lambda completions: 1",
        "try:\n    from fast import score\nexcept ImportError:\n    def score(completions): ...",
        "for name in ('score',):\n    globals()[name] = print",
        "def make():\n    global score\n    score = print\nmake()",
        "first, (score, *rest) = [print] * 2",
        "with open('x') as score: ...",
        "raise SystemExit('this file is run')\ndef score(completions): ...",
    ],
)
def test_a_reward_file_that_may_define_the_function_is_accepted_without_being_run(code: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(code)
    assert parse(f"{SCRIPTED} --reward {tmp_path}/mine.py:score".split()).reward.functions


def test_a_parser_of_thoughts_is_for_vllm(model: Path) -> None:
    found = problems(f"{VLLM} --hf-model {model} --rollout-reasoning-parser r1 --rollout-engine scripted")
    assert any(line.startswith("--rollout-reasoning-parser r1 is for") for line in found)


def test_engines_have_as_long_to_start_as_the_flag_says(model: Path, tmp_path: Path) -> None:
    words = VLLM.replace("/nowhere/run", str(tmp_path / "run"))
    settings = parse(f"{words} --hf-model {model} --rollout-start-minutes 45".split())

    async def find_deadline() -> float:
        async with contextlib.AsyncExitStack() as stack:
            factory = _build_factory(settings, stack, StartNotes(tmp_path / "starting.json", []))
            assert isinstance(factory, VllmFactory)
            return factory._deadlines.start

    assert asyncio.run(find_deadline()) == 45 * 60


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--max_num_seqs 4", "--max-num-seqs is set by --rollout-max-num-seqs: write that"),
        ("--seed 3 -tp=2", "-tp is set by --rollout-tensor-parallel-size: write that"),
        ("--hos 0.0.0.0", "--hos (short for --host) is not free: drop it"),
        ("--load-for dummy", "--load-for (short for --load-format) is not free: drop it"),
        ("--logprobs_mod=raw_logits", "--logprobs-mod (short for --logprobs-mode) is not free: drop it"),
        ("--logprobs-mode raw_logprobs", "--logprobs-mode is not free: drop it"),
        ("fp8", "'fp8' must begin with a flag of vLLM"),
        ("--kv-cache-dtype 'fp8", "cannot be read: No closing quotation"),
    ],
)
def test_flags_of_vllm_that_are_not_free_are_refused(text: str, message: str, model: Path) -> None:
    with pytest.raises(UsageError) as raised:
        parse([*VLLM.split(), "--hf-model", str(model), f"--rollout-vllm-args={text}"])
    assert message in str(raised.value)
    with pytest.raises(UsageError, match="--rollout-vllm-args is for --rollout-engine vllm, not scripted"):
        parse([*SCRIPTED.split(), "--reward", "exact", f"--rollout-vllm-args={text}"])


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        ("--model other", "--model"),
        ("--tokenizer=other", "--tokenizer"),
        ("--dtype float32 --uds /tmp/other", "--uds"),
        ("--served-model-nam other", "--served-model-name"),
        ("--api-key secret", "--api-key"),
        ("--config other.yaml", "--config"),
        ("--enable_prefix_caching", "--enable-prefix-caching"),
        ("--max-num-seqs 2", "--max-num-seqs"),
        ("--tensor-parallel-size 2", "--tensor-parallel-size"),
        ("-tp=2", "-tp"),
        ("--generation-config auto", "--generation-config"),
    ],
)
def test_flags_of_vllm_that_are_set_for_a_judge_are_refused(text: str, flag: str, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "question.txt").write_text("{response}")
    words = [*SCRIPTED.split(), "--platform", "cpu", "--reward", f"judge:{tmp_path}"]
    words += ["--judge-prompt", f"{tmp_path}/question.txt"]
    assert parse([*words, "--judge-vllm-args=--max-model-len 64 --max-num-batched-tokens 64"])
    with pytest.raises(UsageError) as raised:
        parse([*words, f"--judge-vllm-args={text}"])
    assert raised.value.problems == (f"--judge-vllm-args sets {flag}, which is set for the judge already: drop it",)


def test_a_folder_in_scaled_blocks_is_refused_for_engines_only(tmp_path: Path) -> None:
    folder = hf_models.draw("qwen3", tmp_path / "model")
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    (found,) = problems(f"{VLLM} --hf-model {folder}")
    assert "has a quantization_config, and engines get weights that are not quantized: write a folder" in found
    assert parse(f"{VLLM} --hf-model {folder} --rollout-engine scripted".split())


def test_supported_head_sizes_are_48_and_those_of_the_installed_vllm() -> None:
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    tree = ast.parse((Path(found.origin).parent / "v1/attention/backends/cpu_attn.py").read_text())
    (function,) = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "get_supported_head_sizes"]
    (answer,) = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
    assert answer.value is not None
    assert set(CPU_HEAD_SIZES) == {48, *ast.literal_eval(answer.value)}


def test_a_model_that_cannot_be_read_is_said_with_all_else_and_alone_is_an_error_of_input() -> None:
    with pytest.raises(InputError, match="/no/model/config.json does not exist"):
        parse(f"{VLLM} --hf-model /no/model".split())
    found = problems(f"{VLLM} --hf-model /no/model --rollout-num-threads 0")
    assert len(found) == 2
    assert "/no/model/config.json does not exist" in found[1]


def test_a_message_gives_the_settings_that_its_flags_are_parsed_to(model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(completions): ...")
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    settings = parse(
        f"{VLLM} --hf-model {model} --reward {tmp_path}/mine.py:score=0.5 --reward-readable {tmp_path} "
        f"--reward-memory-gib 0.5 --reward-environment PATH --rollout-python {python} --trace off "
        "--rollout-max-model-len 128 --rollout-dtype float32 --rollout-start-minutes 2.5 --rollout-max-in-flight 5 "
        "--rollout-listen [::1]:0".split()
    )
    path = tmp_path / "sidecar.json"
    write_message(path, settings)
    assert read_settings(["--settings", str(path)]) == settings
    assert path.stat().st_mode & 0o077 == 0


def test_every_field_of_a_message_comes_back_as_it_was(tmp_path: Path) -> None:
    """Give each flag of the sidecar a value that is not its default."""
    values = {int: 3, float: 2.5, str: "x", Path: Path("/some/where"), bool: True}
    fields: dict[str, dict[str, object]] = {}
    for flag in list_flags():
        subject, _, field = flag.targets[0].partition(".")
        # A switch converts no word.
        kind = int if isinstance(flag.convert, IntegerOr) else flag.convert or bool
        value = flag.choices[-1] if flag.choices else values[kind]
        assert value != flag.default
        fields.setdefault(subject, {})[field] = value if flag.nargs in (None, "?") else [value, value]
    rollout, reward = RolloutConfig(**fields.pop("rollout")), RewardConfig(**fields.pop("reward"))
    environment = EnvironmentConfig(**fields.pop("environment"))
    of_others = {name: value for values in fields.values() for name, value in values.items()}
    settings = SidecarSettings(rollout=rollout, reward=reward, environment=environment, **of_others)  # type: ignore[arg-type]
    path = tmp_path / "sidecar.json"
    write_message(path, settings)
    assert read_settings(["--settings", str(path)]) == settings


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            f'"wire": {WIRE_VERSION}',
            '"wire": 0',
            f"the wire version of the message is 0, and this side speaks {WIRE_VERSION}",
        ),
        (
            '"num_engines": 1',
            '"num_engines": "one"',
            r"Expected `int`, got `str` - at `\$.settings.rollout.num_engines`",
        ),
        ('"num_engines"', '"num_engins"', "the field num_engins of SidecarMessage.settings.rollout is unknown"),
        ('"max_num_seqs"', '"a": 1, "max_num_seqs"', "the field a of SidecarMessage.settings.rollout is unknown"),
        ("{", "", f"not a SidecarMessage of wire version {WIRE_VERSION}"),
    ],
)
def test_a_message_of_another_version_or_with_other_fields_is_refused(
    old: str, new: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "sidecar.json"
    write_message(path, parse(f"{SCRIPTED} --reward exact".split()))
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(InputError, match=said):
        read_settings(["--settings", str(path)])


def test_a_message_that_is_missing_or_given_with_flags_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--settings /no/message cannot be read"):
        read_settings(["--settings", "/no/message"])
    with pytest.raises(UsageError, match="no other flags may be given"):
        read_settings(["--settings", "/no/message", "--rollout-num-engines", "2"])
    assert read_settings(f"{SCRIPTED} --reward exact".split()).rollout.engine == "scripted"
