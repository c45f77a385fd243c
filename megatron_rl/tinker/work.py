"""The work that the front has for the ranks, and their results, as messages.

Ranks ask for the next piece with GET /v1/work, and send its result with POST /v1/work/NUMBER. A piece is done by all
ranks together. It has taken full effect once its result has arrived, or none if its result is a failure.
"""

import msgspec

from megatron_rl.shared.protocol.wire import PublishAnswer


class Datum(msgspec.Struct, frozen=True, array_like=True):
    """A sequence to train on. Position i of its tokens predicts row i of its targets, each of `width` tokens."""

    tokens: bytes
    targets: bytes
    inputs: dict[str, bytes]
    """The values of the loss's inputs, float32, by name: one for each target."""
    width: int = 1
    own: bytes = b""
    """A byte for each target: 1 if it has a gradient, since it was sampled or has a weight. None has if empty."""


class Create(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Make a model with fresh adapters, drawn by the seed; without adapters, with the base's weights."""

    model: str
    seed: int


class Pass(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Compute the log-probs of data's targets and, unless `is_forward_only`, add the gradient of their loss."""

    model: str
    data: list[Datum]
    loss: str
    settings: dict[str, float]
    is_forward_only: bool = False


class Step(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Make an AdamW step with the gradients that passes have added, and clear them."""

    model: str
    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    clip: float
    """The largest norm of the gradients; 0 does not bound it."""


class Keep(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Keep a copy of a model's weights under a name."""

    model: str
    name: str


class Recall(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Keep the weights of a checkpoint under a name."""

    name: str
    folder: str


class Forget(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Forget weights that were kept, or a model."""

    names: list[str]


class Bring(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Bring weights that were kept to the engines, as this version; without a name, the base's."""

    name: str | None
    version: int


class Score(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Compute the log-probs of the tokens of sequences, from the second on, under weights that were kept."""

    name: str | None
    sequences: list[bytes]


class Save(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Write a model, with its optimizer, as a checkpoint into a new folder."""

    model: str
    folder: str


class Load(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Give a model the weights of a checkpoint and, if asked, its optimizer's state; make the model if it is new."""

    model: str
    folder: str
    has_optimizer: bool


class Export(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Write weights that were kept into a new folder, in the format of Hugging Face or, for adapters, of PEFT."""

    name: str
    folder: str


Work = Create | Pass | Step | Keep | Recall | Forget | Bring | Score | Save | Load | Export


class Assigned(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of work with its number, which grows by 1."""

    number: int
    work: Work


class PassDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The result of a pass: the log-probs of each datum's targets, and the sums of its losses."""

    log_probs: list[bytes]
    sums: dict[str, float]


class StepDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    gradient_norm: float
    num_steps: int
    """The number of steps that the model has made."""


class PublishDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    fingerprint: str
    answer: PublishAnswer


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The result of work that has nothing to tell but this number: the steps that the model has made."""

    num_steps: int = 0


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The reason why the work was not done, for its client."""

    reason: str


Result = PassDone | StepDone | PublishDone | Done | Failed

ASSIGNED = msgspec.msgpack.Decoder(Assigned | None)
RESULT = msgspec.msgpack.Decoder(Result)
