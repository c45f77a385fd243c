"""What a command line is resolved to: our own configuration by subject, and Megatron's. Nothing here needs torch."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.rollout import (
    DataConfig,
    PublishConfig,
    RewardConfig,
    RolloutConfig,
    SamplingConfig,
    ServiceConfig,
)
from megatron_rl.config.subjects import (
    AttentionConfig,
    CheckpointConfig,
    DistributedConfig,
    EvaluationConfig,
    LoopConfig,
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
    attention: AttentionConfig = AttentionConfig()
    training: TrainingConfig = TrainingConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    distributed: DistributedConfig = DistributedConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    data: DataConfig = DataConfig()
    sampling: SamplingConfig = SamplingConfig()
    service: ServiceConfig = ServiceConfig()
    publish: PublishConfig = PublishConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    loop: LoopConfig = LoopConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    observe: ObserveConfig = ObserveConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Subjects):
    """Everything that a command line said, checked, and what follows from it."""

    platform: str
    # The ranks of the run; None if not known yet, because no launcher has started this process.
    world_size: int | None
    architecture: Architecture
    # megatron-core's TransformerConfig, OptimizerConfig and DistributedDataParallelConfig. Code that builds something
    # of them takes a copy, since Megatron writes into it.
    transformer: Any
    optimizer: Any
    ddp: Any
    # Where a value came from, under "subject.field"; what is not here is a default.
    sources: Mapping[str, str]
    # What was asked for and has no effect; printed once at the start.
    notes: tuple[str, ...] = ()

    @property
    def parallel_sizes(self) -> ParallelSizes:
        """Over how many ranks each dimension is divided."""
        config = self.transformer
        return ParallelSizes(
            tensor=config.tensor_model_parallel_size,
            pipeline=config.pipeline_model_parallel_size,
            virtual_pipeline=config.virtual_pipeline_model_parallel_size,
            context=config.context_parallel_size,
            expert=config.expert_model_parallel_size,
            expert_tensor=config.expert_tensor_parallel_size,
        )
