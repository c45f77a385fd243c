"""vLLM's own tests of its OpenAI interfaces, unchanged, against `megatron-rl serve`.

`make test-clones VLLM_TESTS=SOURCES` runs it; SOURCES are vLLM's, a clone or the package of sources of PyPI, of the
version that is installed here.
"""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import peft
import pytest
import transformers

from tests import chat_models, hf_models

SOURCES = os.environ.get("VLLM_TESTS")
FILES = "models/test_models.py completion/test_completion.py chat_completion/test_chat.py"
# They run without a limit of tokens, and random weights do not end an answer.
UNENDING = (
    "test_structured_outputs_json_chat test_response_format_json test_extra_fields_allowed "
    "test_complex_message_content test_custom_role test_more_than_one_prompt_logprobs_chat"
)
# Why others do not pass.
REASONS = {
    "expects the numbers of tokens of a released tokenizer": "test_single_completion test_single_chat_session",
    "expects a text of the last token, but a byte of a letter has none": "test_completion_streaming",
    "names the token 5000, which a vocabulary of bytes lacks": "test_logprob_token_ids test_logprob_token_ids_stream",
    "expects another answer after an objection": "test_structured_outputs_choice_chat",
    "sends no key, which this server demands": "test_invocations",
}


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.skipif(SOURCES is None, reason="make test-clones VLLM_TESTS=SOURCES runs it")
def test_vllms_own_tests_pass_against_what_is_served(tmp_path: Path) -> None:
    sizes = {"vocab_size": chat_models.VOCAB_SIZE, "max_position_embeddings": 32768, "head_dim": 32}
    model = hf_models.draw("qwen3", tmp_path / "policy", **sizes)
    chat_models.save_tokenizer(model, chat_models.HERMES, "<|im_end|>")
    policy = transformers.AutoModelForCausalLM.from_pretrained(model)
    adapter = peft.get_peft_model(policy, peft.LoraConfig(r=8, target_modules=["q_proj"]))
    adapter.save_pretrained(tmp_path / "adapter")
    # Without the package `vllm` next to them, which is not compiled.
    (tmp_path / "tests").symlink_to(Path(str(SOURCES), "tests").resolve())
    results = tmp_path / "results.xml"
    command = [sys.executable, "-m", "pytest", "-p", "served_by_us", "--junitxml", str(results)]
    command += ["-k", f"not ({' or '.join(UNENDING.split())})"]
    command += [f"tests/entrypoints/openai/{file}" for file in FILES.split()]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)})
    cases = list(ElementTree.parse(results).iter("testcase"))
    failed = {case.get("name", "").partition("[")[0] for case in cases if len(case)}
    print(f"{sum(not len(case) for case in cases)} of {len(cases)} pass; not {sorted(failed)}")
    assert len(cases) > 60
    assert failed <= set(" ".join(REASONS.values()).split())
