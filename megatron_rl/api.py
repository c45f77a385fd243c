"""Runs and services from Python: a notebook starts them, and reads what they leave as tables.

    from megatron_rl import api

    run = api.train("--hf-model", MODEL, "--prompts", PROMPTS, "--reward", REWARD, "--rollout-folder", FOLDER)
    pandas.DataFrame(run.metrics())

    with api.serve("--hf-model", MODEL, "--rollout-folder", FOLDER) as service:
        service.sample("2+2=")
        service.log_probs("2+2=4")

The flags are those of the command line, and runs are processes of their own. A table is a list of rows, and a row a
mapping from names to plain values. docs/training.md tells more.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from megatron_rl.errors import MegatronRLError, UsageError
from megatron_rl.observe.metrics import FILE_NAME as METRICS_FILE
from megatron_rl.observe.metrics import flat, read_metrics
from megatron_rl.observe.run_folder import find_run
from megatron_rl.observe.samples import FILE_NAME as SAMPLES_FILE
from megatron_rl.shared.protocol.wire import decode_log_probs, decode_tokens
from megatron_rl.shared.records.append_file import make_private_folder, read_lines
from megatron_rl.shared.records.audit_check import verify
from megatron_rl.shared.records.audit_log import FILE_NAME as AUDIT_FILE
from megatron_rl.shared.records.journal import find_journal, read_groups

Row = dict[str, Any]
_POLL_SECONDS, _END_SECONDS = 0.5, 120.0
_SHOWN = 4000
"""The last characters of a failed process's output that its error shows."""


class ProcessFailed(MegatronRLError):
    """A process that ended with an error, which the message has."""


class BreachFound(MegatronRLError):
    """A breach of an audit log."""


class Run:
    """The folder of a run, which may continue meanwhile."""

    def __init__(self, folder: Path | str) -> None:
        """Open the folder of the run, the folder above it, or the folder of --save."""
        self.folder = find_run(Path(folder), AUDIT_FILE)

    def metrics(self) -> list[Row]:
        """Return a row an iteration, with `version` and names such as `reward/mean` and `time/train`."""
        return [{"version": one["version"], **flat(one)} for one in read_metrics(self.folder / METRICS_FILE)]

    def samples(self) -> list[Row]:
        """Return a row for each response that was written as text."""
        rows = []
        for group in read_lines(self.folder / SAMPLES_FILE):
            of_group = {name: value for name, value in group.items() if name != "responses"}
            rows += [of_group | response for response in group["responses"]]
        return rows

    def tokens(self, version: int) -> list[Row]:
        """Return a row for each token that was sampled from this version, as its journal has it, which must be kept."""
        path = find_journal(self.folder / "journal", version)
        if not path.exists():
            raise UsageError(f"{path} does not exist: --rollout-retain-journals says how many are kept")
        rows = []
        for group in read_groups(path):
            for number, response in enumerate(group.responses):
                place: Row = {"version": version, "prompt": group.prompt_index, "response": number}
                place |= {"engine": response.engine, "fingerprint": response.fingerprint, "reward": response.reward}
                pairs = zip(decode_tokens(response.tokens), decode_log_probs(response.log_probs), strict=True)
                rows += [
                    {**place, "place": index, "token": int(token), "log_prob": float(log_prob)}
                    for index, (token, log_prob) in enumerate(pairs)
                ]
        return rows

    def audit(self) -> list[Row]:
        """Check the whole audit log; return a row for each iteration, or raise BreachFound for the first breach."""
        report = verify(self.folder)
        if report.breaches:
            first = report.breaches[0]
            raise BreachFound(
                f"{len(report.breaches)} breaches; {report.place(first.line)}: {first.name}: {first.detail}"
            )
        names = ("version", "fingerprint", "outcome", "num_groups", "num_responses", "num_tokens")
        return [{name: getattr(one, name) for name in names} for one in report.iterations]


class _Process:
    """A process and what it prints. It continues if this Python is killed."""

    def __init__(self, words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        make_private_folder(folder)
        self._path = folder / "output.log"
        with self._path.open("wb") as output:
            self._process = _start(words, output, environment)

    def read(self) -> str:
        return self._path.read_text(errors="replace")

    def wait(self) -> None:
        """Wait for the end; an interrupt ends the process too."""
        try:
            self._process.wait()
        except BaseException:
            self.end()
            raise
        self.check()

    def check(self) -> None:
        """Raise ProcessFailed if it ended with an error."""
        if self._process.poll():
            code = self._process.returncode
            raise ProcessFailed(f"exit code {code}; the end of {self._path}:\n{self.read()[-_SHOWN:]}")

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _start(words: Sequence[str], output: IO[bytes], environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, *words]
    # A notebook's own Ctrl-C is not for them.
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment},
        start_new_session=True,
    )


def _find_folder(flags: Sequence[str]) -> Path:
    if "--rollout-folder" not in flags[:-1]:
        raise UsageError("--rollout-folder is missing: name the folder of the run, in which its results will be")
    return Path(flags[flags.index("--rollout-folder") + 1])


def train(*flags: str, ranks: int = 1) -> Run:
    """Train with these flags to the end, on `ranks` ranks of this host; return the run."""
    folder, launcher = _find_folder(flags), list[str]()
    if ranks > 1:
        launcher = ["torch.distributed.run", "--nproc-per-node", str(ranks), "-m"]
    _Process(["-m", *launcher, "megatron_rl", *flags], folder, {}).wait()
    return Run(folder)


class Service:
    """A service of Tinker's interface, and its base model."""

    def __init__(self, address: str, key: str, base_model: str) -> None:
        """Connect to a service that runs; `serve` starts one."""
        import tinker

        self.address, self.key, self.base_model = address, key, base_model
        self.client: Any = tinker.ServiceClient(base_url=address, api_key=key)
        """Tinker's own client, with which models are trained."""
        self._types = tinker
        self._sampler: Any = None
        self._tokenizer: Any = None

    def sample(
        self, prompt: str | Sequence[int], count: int = 1, *, max_tokens: int = 64, seed: int | None = None,
        temperature: float = 1.0, sampler: Any = None,
    ) -> list[Row]:  # fmt: skip
        """Return a row for each sequence that is sampled after a prompt; `sampler` is the client's, or the base's."""
        params = self._types.SamplingParams(max_tokens=max_tokens, seed=seed, temperature=temperature)
        sampler = sampler or self._open_sampler()
        answer = sampler.sample(prompt=self._encode(prompt), num_samples=count, sampling_params=params).result()
        return [
            {
                "text": self.tokenizer.decode(one.tokens),
                "tokens": [*one.tokens],
                "log_probs": [*one.logprobs],
                "stop_reason": one.stop_reason,
                "sequence": one.sequence_id,
            }
            for one in answer.sequences
        ]

    def log_probs(self, text: str | Sequence[int], sampler: Any = None) -> list[Row]:
        """Return a row for each token with the ranks' log-prob of it after those before; the first one has none."""
        prompt = self._encode(text)
        found = (sampler or self._open_sampler()).compute_logprobs(prompt).result()
        return [
            {"token": token, "text": self.tokenizer.decode([token]), "log_prob": log_prob}
            for token, log_prob in zip(prompt.to_ints(), found, strict=True)
        ]

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = self._open_sampler().get_tokenizer()
        return self._tokenizer

    def _open_sampler(self) -> Any:
        if self._sampler is None:
            self._sampler = self.client.create_sampling_client(base_model=self.base_model)
        return self._sampler

    def _encode(self, text: str | Sequence[int]) -> Any:
        tokens = self.tokenizer.encode(text) if isinstance(text, str) else [*text]
        return self._types.ModelInput.from_ints(tokens)


@contextlib.contextmanager
def serve(*flags: str, ranks: int = 1) -> Iterator[Service]:
    """Serve Tinker's interface with these flags until the context ends."""
    if "--hf-model" not in flags[:-1]:
        raise UsageError("--hf-model is missing: name the folder of the model that is to be served")
    folder, model = _find_folder(flags), flags[flags.index("--hf-model") + 1]
    key = f"tml-{secrets.token_hex(24)}"
    words = ["-m", "megatron_rl.cli", "serve", "--tinker", "--nproc-per-node", str(ranks), *flags]
    process = _Process([*words, "--serve-base-model", model], folder, {"MEGATRON_RL_SERVE_KEYS": key})
    try:
        while "export TINKER_BASE_URL=" not in (printed := process.read()):
            process.check()
            if process.has_ended:
                raise ProcessFailed(f"the service has ended:\n{printed[-_SHOWN:]}")
            time.sleep(_POLL_SECONDS)
        address = printed.partition("export TINKER_BASE_URL=")[2].split()[0]
        yield Service(address, key, model)
    finally:
        process.end()
