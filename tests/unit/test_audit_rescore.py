"""`megatron-rl audit RUN --rescore N`: an engine that samples with other weights than it claims is caught by name."""

import dataclasses
import itertools
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_rl import cli
from megatron_rl.commands.rescore import _differences, _read_fingerprint
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.provenance import derive_group_seed
from megatron_rl.shared.records.audit_chain import BreachName
from megatron_rl.shared.records.audit_check import verify
from megatron_rl.shared.records.audit_log import FILE_NAME
from megatron_rl.shared.records.audit_samples import Sample, choose_samples, read_kept
from megatron_rl.sidecar.engines import WeightReport
from megatron_rl.sidecar.iteration import Iteration
from megatron_rl.sidecar.publication import Proof
from megatron_rl.sidecar.recorder import RunRecorder
from tests import hf_models

GROUP_SIZE = 2
ENGINES = ("engine-0", "engine-1")
TEMPERATURE = 0.7
# The relative change of every weight: log-probs change by some ten-thousandths.
STEP = 3e-5


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """Versions 3, 4 and 5 of a policy, as --save-hf leaves them, and their fingerprints."""

    folder: Path
    fingerprints: dict[int, str]

    def of(self, version: int) -> Path:
        return self.folder / f"iter_{version:07d}"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    folder = tmp_path_factory.mktemp("checkpoints")
    for version in (3, 4, 5):
        hf_models.draw("qwen3", folder / f"iter_{version:07d}", seed=version, num_hidden_layers=2)
    return Checkpoints(folder, {version: _read_fingerprint(folder / f"iter_{version:07d}") for version in (3, 4, 5)})


def sampled(
    checkpoint: Path, submission: wire.Submission, prompts: list[wire.Prompt], engine: str, noise: float = 0.0
) -> list[wire.Group]:
    """Sample groups whose log-probs are those of this checkpoint, whatever the submission says."""
    seeds = [derive_group_seed(submission.run, submission.version, prompt.index) for prompt in prompts]
    tokens = [
        hf_models.sequences([3 + prompt.index % 4 + number for number in range(GROUP_SIZE)], seed=seed % 2**31)
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    whole = [
        [*wire.decode_tokens(prompt.tokens).tolist(), *response]
        for prompt, responses in zip(prompts, tokens, strict=True)
        for response in responses
    ]
    found = iter(hf_models.log_probs(checkpoint, whole, TEMPERATURE))
    return [
        wire.Group(
            prompt=prompt,
            responses=[
                wire.Response(
                    tokens=wire.encode_tokens(response),
                    log_probs=wire.encode_log_probs(
                        (next(found)[-len(response) :] + noise * torch.linspace(-1, 1, len(response))).numpy()
                    ),
                    finish_reason="stop",
                    seed=seed + number,
                    engine=engine,
                    spans=[wire.VersionSpan(version=str(submission.version), start=0, end=len(response))],
                    fingerprint=submission.fingerprint,
                )
                for number, response in enumerate(responses)
            ],
        )
        for prompt, seed, responses in zip(prompts, seeds, tokens, strict=True)
    ]


def record(
    run: Path,
    checkpoints: Checkpoints,
    versions: Sequence[int] = (3, 4),
    lying: str = "",
    noise: float = 0.0,
    num_prompts: int = 4,
    quantization: str = "",
) -> Path:
    """Record a run of these versions, as the service does; a lying engine keeps the first version."""
    plan = wire.Plan(num_prompts=num_prompts, group_size=GROUP_SIZE, num_replicas=1, micro_batch_size=GROUP_SIZE)
    recorder = RunRecorder(run, "run", retain=2)
    for version in versions:
        fingerprint = checkpoints.fingerprints[version]
        weights = wire.Weights(
            run="run", version=version, fingerprint=fingerprint, source=wire.FileSource(folder=""), dtype="float32"
        )
        report = WeightReport(version, fingerprint, quantization=quantization)
        recorder.published(weights, [Proof(engine, report) for engine in ENGINES])
        prompts = [
            wire.Prompt(index=index, row=f"row-{index}", tokens=wire.encode_tokens([5, 6, index]))
            for index in range(num_prompts)
        ]
        submission = wire.Submission(
            run="run", version=version, fingerprint=fingerprint, plan=plan, prompts=prompts, deadline_seconds=60,
            sampling=wire.Sampling(max_tokens=16, temperature=TEMPERATURE),
        )  # fmt: skip
        recorder.begin(submission)
        iteration = Iteration(submission, recorder.finished, recorder.claimed)
        for number, engine in enumerate(ENGINES):
            held = versions[0] if engine == lying else version
            for group in sampled(checkpoints.of(held), submission, prompts[number::2], engine, noise):
                iteration.finished(group)
                iteration.claim(0, group.prompt.index)
        recorder.completed(version)
    recorder.close()
    return run


def audit(run: Path, folder: Path, *words: str, count: int = 16) -> int:
    return cli.main(["audit", str(run), "--rescore", str(count), "--checkpoints", str(folder), *words])


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory, checkpoints: Checkpoints) -> Path:
    return record(tmp_path_factory.mktemp("honest") / "run", checkpoints)


def test_log_probs_of_the_weights_that_were_published_pass_and_the_differences_are_said(
    honest, checkpoints, capsys
) -> None:
    assert audit(honest, checkpoints.folder) == 0
    output = capsys.readouterr().out
    assert "16 responses of 2 versions computed again, 0 breaches" in output
    for version in (3, 4):
        # Four prompts with two responses of 3 to 7 tokens each.
        line = re.search(rf"^ +{version} +8 +40 +(\S+) +(\S+) +0.001$", output, re.MULTILINE)
        assert line is not None, output
        assert 0 <= float(line[2]) <= float(line[1]) < 1e-5


def test_fewer_responses_are_spread_over_the_versions_and_always_the_same(honest: Path) -> None:
    samples = read_kept(honest).samples
    chosen = choose_samples(samples, 5, "seed")
    assert sorted(sample.version for sample in chosen) == [3, 3, 3, 4, 4]
    assert len({(sample.version, sample.prompt, sample.number) for sample in chosen}) == 5
    assert choose_samples(samples, 5, "seed") == chosen != choose_samples(samples, 5, "another")
    assert len(choose_samples(samples, 100, "seed")) == 16


def test_an_engine_that_kept_the_weights_of_the_version_before_is_caught_by_name(tmp_path, checkpoints, capsys) -> None:
    run = record(tmp_path / "run", checkpoints, versions=(4, 5), lying="engine-1")
    assert cli.main(["audit", str(run)]) == 0
    capsys.readouterr()
    assert audit(run, checkpoints.folder) == 5
    breaches = [line for line in capsys.readouterr().out.splitlines() if line.startswith("BREACH")]
    assert len(breaches) == 4
    for line in breaches:
        assert re.search(r"log-probs of other weights: .* of version 5 \(engine engine-1\).* beyond 0.001", line)


@pytest.mark.each_change
@pytest.mark.parametrize("noise", [0.0, 1e-4])
def test_old_weights_are_found_though_a_step_changes_less_than_the_bound(tmp_path, noise: float, capsys) -> None:
    folder = tmp_path / "checkpoints"
    hf_models.draw("qwen3", folder / "iter_0000003", num_hidden_layers=2)
    model = AutoModelForCausalLM.from_pretrained(folder / "iter_0000003", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + STEP)
    model.save_pretrained(folder / "iter_0000004")
    steps = Checkpoints(folder, {version: _read_fingerprint(folder / f"iter_{version:07d}") for version in (3, 4)})
    honest = record(tmp_path / "honest" / "run", steps, noise=noise, num_prompts=8)
    assert audit(honest, folder, count=32) == 0
    lying = record(tmp_path / "lying" / "run", steps, lying="engine-1", noise=noise, num_prompts=8)
    capsys.readouterr()
    assert audit(lying, folder, count=32) == 5
    output = capsys.readouterr().out
    worst = re.search(r"^ +4 +16 +\d+ +(\S+)", output, re.MULTILINE)
    assert worst is not None
    assert float(worst[1]) < 1e-3
    breaches = [line for line in output.splitlines() if line.startswith("BREACH")]
    assert len(breaches) == 1
    assert "log-probs of other weights: 8 responses of version 4 (engine engine-1) are nearer to version 3" in output


def test_log_probs_that_are_off_by_more_than_the_bound_are_a_breach_and_the_bound_can_be_given(
    tmp_path, checkpoints, capsys
) -> None:
    run = record(tmp_path / "run", checkpoints, versions=(3,), noise=0.004)
    assert audit(run, checkpoints.folder) == 5
    assert "token 0 is 0.004 off, beyond 0.001" in capsys.readouterr().out
    assert audit(run, checkpoints.folder, "--rescore-bound", "0.005") == 0


def test_a_checkpoint_of_other_weights_is_a_breach_and_nothing_is_computed_from_it(
    honest, checkpoints, tmp_path, capsys
) -> None:
    shutil.copytree(checkpoints.of(3), tmp_path / "iter_0000003")
    shutil.copytree(checkpoints.of(5), tmp_path / "iter_0000004")
    assert audit(honest, tmp_path) == 5
    output = capsys.readouterr().out
    assert "checkpoint holds other weights" in output
    assert f"has fingerprint {checkpoints.fingerprints[5][:12]}, and version 4 was published with" in output
    assert "8 responses of 1 version computed again, 1 breach" in output


def test_versions_that_cannot_be_computed_again_are_named_with_the_reason(tmp_path, checkpoints, capsys) -> None:
    run = record(tmp_path / "run", checkpoints, versions=(3, 4, 5))
    folder = tmp_path / "checkpoints"
    shutil.copytree(checkpoints.of(5), folder / "iter_0000005")
    assert audit(run, folder) == 0
    output = capsys.readouterr().out
    assert re.search(r"^ +3 not computed again: its journal .*00000003.journal is no longer kept", output, re.M)
    assert re.search(r"^ +4 not computed again: the checkpoint .*iter_0000004 does not exist$", output, re.M)
    assert "8 responses of 1 version computed again" in output


def test_rescoring_without_a_response_to_compute_fails(honest, tmp_path, capsys) -> None:
    assert audit(honest, tmp_path) == 4
    assert "no response" in capsys.readouterr().err


def test_a_journal_that_holds_other_responses_than_the_log_is_a_breach(honest, checkpoints, tmp_path, capsys) -> None:
    other = record(tmp_path / "other" / "run", checkpoints, versions=(3,), noise=1e-4)
    run = tmp_path / "run"
    shutil.copytree(honest, run)
    shutil.copyfile(other / "journal" / "00000003.journal", run / "journal" / "00000003.journal")
    assert audit(run, checkpoints.folder) == 5
    output = capsys.readouterr().out
    assert output.count("journal holds other responses: 00000003.journal: response 0 of prompt") == 4
    assert "3 not computed again: its journal" in output


def test_each_byte_of_a_journal_that_is_changed_is_a_breach_with_its_file(honest: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(honest, run)
    journal = run / "journal" / "00000003.journal"
    content = journal.read_bytes()
    for place in range(0, len(content), 7):
        journal.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        names = [(breach.name, breach.detail.partition(":")[0]) for breach in verify(run).breaches]
        assert names == [(BreachName.DAMAGED_JOURNAL, str(journal))], place


def test_a_journal_whose_last_record_a_kill_has_torn_is_no_breach(honest: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(honest, run)
    journal = run / "journal" / "00000004.journal"
    content = journal.read_bytes()
    for size in range(0, len(content), 7):
        journal.write_bytes(content[:size])
        assert verify(run).breaches == []


def test_a_damaged_journal_is_a_breach_of_the_audit_whatever_can_be_computed_again(
    honest: Path, checkpoints: Checkpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(honest, run)
    journals = [run / "journal" / f"{version:08d}.journal" for version in (3, 4)]
    for number, journal in enumerate(journals):
        content = bytearray(journal.read_bytes())
        content[len(content) // 2] ^= 1
        journal.write_bytes(content)
        assert audit(run, checkpoints.folder) == 5
        output = capsys.readouterr().out
        assert output.count(": damaged journal: ") == number + 1
        assert re.search(rf"BREACH line \d+: damaged journal: {journal}: the record at byte \d+ is damaged", output)
    assert cli.main(["audit", str(run)]) == 5


def test_the_bound_must_be_given_if_engines_quantize(tmp_path, checkpoints, capsys) -> None:
    run = record(tmp_path / "run", checkpoints, versions=(3,), noise=0.004, quantization="fp8_per_channel")
    assert audit(run, checkpoints.folder) == 2
    assert "quantize (fp8_per_channel), so their log-probs are not the weights' own" in capsys.readouterr().err
    assert audit(run, checkpoints.folder, "--rescore-bound", "0.005") == 0


def test_a_journal_that_a_sidecar_writes_to_can_be_read(tmp_path, checkpoints) -> None:
    recorder = RunRecorder(record(tmp_path / "run", checkpoints, versions=(3,)), "run")
    assert len(read_kept(tmp_path / "run").samples[3]) == 8
    recorder.close()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--rescore", "4"), 2, "--checkpoints is missing"),
        (("--rescore", "0", "--checkpoints", "."), 2, "--rescore 0 must be at least 1"),
        (("--rescore", "4", "--checkpoints", "nowhere"), 4, "--checkpoints nowhere must be a folder"),
        (("--rescore", "4", "--checkpoints", ".", "--rescore-bound", "nan"), 2, "--rescore-bound nan"),
        (("--checkpoints", "."), 2, "need --rescore N"),
    ],
)
def test_flags_that_do_not_go_together_are_refused_before_the_log_is_read(words, code, message, capsys) -> None:
    assert cli.main(["audit", "no-such-run", *words]) == code
    assert message in capsys.readouterr().err


def test_the_log_alone_is_checked_without_torch(honest: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from megatron_rl.cli import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules; sys.exit(code)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, "audit", str(honest / FILE_NAME)], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_each_branch_is_scored_after_all_that_it_follows(checkpoints: Checkpoints) -> None:
    prompt, parts = [5, 6, 7], [(0, [11, 12, 13]), (2, [14, 15]), (-1, [16, 17])]
    sequences = [[5, 6, 7, 11, 12, 13], [5, 6, 7, 11, 12, 14, 15], [5, 6, 16, 17]]
    scored = hf_models.log_probs(checkpoints.of(3), sequences, TEMPERATURE)
    starts = [0, 3, 5]
    response = wire.Response(
        tokens=wire.encode_tokens([token for _, tokens in parts for token in tokens]),
        log_probs=wire.encode_log_probs(
            torch.cat([values[-len(tokens) :] for values, (_, tokens) in zip(scored, parts, strict=True)]).numpy()
        ),
        finish_reason="stop",
        seed=1,
        engine="engine-0",
        spans=[wire.VersionSpan(version="3", start=start, end=end) for start, end in itertools.pairwise([*starts, 7])],
        branches=[wire.Branch(start=start, after=parts[number][0]) for number, start in enumerate(starts) if number],
        fingerprint="",
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoints.of(3), dtype=torch.float32).eval()
    sample = Sample(3, 0, 0, TEMPERATURE, wire.encode_tokens(prompt), response, line=1)
    assert _differences(model, sample).max() < 1e-5
    chain = dataclasses.replace(sample, response=msgspec.structs.replace(response, branches=[]))
    assert _differences(model, chain)[3:].min() > 1e-3
