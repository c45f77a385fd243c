"""The settings that a command line resolves to: our own by subject, and Megatron's. Nothing here needs torch."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from megatron_rl.algorithm.library.dpo import PreferenceConfig
from megatron_rl.algorithm.settings import AlgorithmConfig
from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.config.rollout import (
    DataConfig,
    PublishConfig,
    RewardConfig,
    RolloutConfig,
    SamplingConfig,
    ServiceConfig,
)
from megatron_rl.config.serve import ServeConfig
from megatron_rl.config.trainer import (
    AttentionConfig,
    CheckpointConfig,
    DistributedConfig,
    EvaluationConfig,
    LoopConfig,
    LoraConfig,
    ModelConfig,
    ObserveConfig,
    RunConfig,
    ScheduleConfig,
    TrainingConfig,
)
from megatron_rl.types import Architecture, ParallelSizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subjects:
    """The table of our own configuration: a field a subject."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    lora: LoraConfig = LoraConfig()
    attention: AttentionConfig = AttentionConfig()
    training: TrainingConfig = TrainingConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    distributed: DistributedConfig = DistributedConfig()
    rollout: RolloutConfig = RolloutConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    reward: RewardConfig = RewardConfig()
    data: DataConfig = DataConfig()
    sampling: SamplingConfig = SamplingConfig()
    service: ServiceConfig = ServiceConfig()
    publish: PublishConfig = PublishConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    preference: PreferenceConfig = PreferenceConfig()
    loop: LoopConfig = LoopConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    observe: ObserveConfig = ObserveConfig()
    serve: ServeConfig = ServeConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftSettings(Subjects):
    """The values of a command line and those that follow from them, while they are checked."""

    platform: str
    # The number of ranks; None if it is unknown, because no launcher has started this process.
    world_size: int | None
    # None if it cannot be read: checks that depend on it are left out.
    architecture: Architecture | None
    # megatron-core's TransformerConfig, OptimizerConfig and DistributedDataParallelConfig, or a namespace of the values
    # that it refuses. Code that builds something of them takes a copy, since Megatron writes into it.
    transformer: Any
    optimizer: Any
    ddp: Any
    # The source of each value, under "subject.field"; a value without a source is a default.
    sources: Mapping[str, str]
    # Flags that were written and have no effect; printed once at the start.
    notes: tuple[str, ...] = ()
    # The same settings with the model of each frozen role in place of the policy's, by the model's name.
    frozen: "Mapping[str, DraftSettings]" = dataclasses.field(default_factory=dict)
    # The same with the critic's model, optimizer and gradient buffers; None without --critic.
    critic: "DraftSettings | None" = None
    # The hashes of the teachers that engines compute, by the model's name; they are read when the run starts.
    served: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def has_held_out(self) -> bool:
        """Check that there are rows to evaluate on."""
        return bool(self.data.held_out or self.data.eval_prompts)

    @property
    def is_evaluated(self) -> bool:
        """Check that the run evaluates the policy. --eval-interval alone has no effect."""
        return self.evaluation.interval is not None and self.has_held_out

    @property
    def parallel_sizes(self) -> ParallelSizes:
        """Return the number of ranks that each dimension is divided over."""
        config = self.transformer
        return ParallelSizes(
            tensor=config.tensor_model_parallel_size,
            pipeline=config.pipeline_model_parallel_size,
            virtual_pipeline=config.virtual_pipeline_model_parallel_size,
            context=config.context_parallel_size,
            expert=config.expert_model_parallel_size,
            expert_tensor=config.expert_tensor_parallel_size,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(DraftSettings):
    """Everything that a command line said, checked, and what follows from it. Nothing is missing or refused."""

    architecture: Architecture
    frozen: "Mapping[str, Settings]" = dataclasses.field(default_factory=dict)
    critic: "Settings | None" = None

    @classmethod
    def accept(cls, draft: DraftSettings, **values: Any) -> Self:
        """Return the settings of a draft with which nothing is wrong; `values` are fields that a subclass adds."""
        assert draft.architecture is not None
        given = {field.name: getattr(draft, field.name) for field in dataclasses.fields(draft)}
        given["critic"] = None if draft.critic is None else Settings.accept(draft.critic)
        given["frozen"] = {name: Settings.accept(teacher) for name, teacher in draft.frozen.items()}
        return cls(**given, **values)
