"""A tree with the parts of megatron.training that a recipe goes through, in the three shapes that versions have.

CI has no tree of Megatron-LM, and wheels for Python 3.11 hold its core alone: that is linked into the stand-in.
"""

import importlib.util
from pathlib import Path

SHAPES = ("0.16", "0.18", "0.19")

_INIT = """
from megatron.training.global_vars import get_args, get_timers
from megatron.training.training import get_model, pretrain
"""
_GLOBAL_VARS = """
from megatron.core.timers import Timers
from torch.utils.tensorboard import SummaryWriter

_args = None

def get_args():
    assert _args is not None
    return _args

def get_timers():
    return _timers

def get_tensorboard_writer():
    return _writer

def get_wandb_writer():
    return None

def get_one_logger():
    return None

class Writer(SummaryWriter):
    def __init__(self, folder):
        self.file = open(folder + ".scalars", "w")

    def add_scalar(self, name, value, step):
        print(step, name, value, file=self.file)

    def flush(self):
        self.file.flush()

    def close(self):
        self.file.close()

def set_global_variables(args, build_tokenizer=True):
    global _args, _timers, _writer
    assert not build_tokenizer, "the recipe has no tokenizer"
    _args, _timers, _writer = args, Timers(args.timing_log_level, "minmax"), None
    if args.tensorboard_dir and args.rank == args.world_size - 1:
        _writer = Writer(args.tensorboard_dir)
"""
_PARSER = """
import argparse
import os

from megatron.training.global_vars import set_global_variables

INTS = '''num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups kv-channels seq-length
    max-position-embeddings micro-batch-size train-iters rotary-base tensor-model-parallel-size
    pipeline-model-parallel-size grpo-group-size timing-log-level'''
FLOATS = "lr norm-epsilon clip-grad weight-decay adam-beta1 adam-beta2"
WORDS = "normalization position-embedding-type lr-decay-style transformer-impl tokenizer-type save load tensorboard-dir"
SWITCHES = '''swiglu group-query-attention disable-bias-linear untie-embeddings-and-output-weights qk-layernorm
    no-persist-layer-norm no-masked-softmax-fusion use-distributed-optimizer log-timers-to-tensorboard'''

def add_megatron_arguments(parser):
    for kind, names in ((int, INTS), (float, FLOATS), (str, WORDS)):
        for name in names.split():
            parser.add_argument(f"--{name}", type=kind)
    for name in SWITCHES.split():
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--spec", nargs="*")
    parser.set_defaults(
        tensor_model_parallel_size=1, pipeline_model_parallel_size=1, transformer_impl="local", timing_log_level=0
    )
    return parser

def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    args = parser.parse_args()
    args.rank, args.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    args.vocab_size = args.padded_vocab_size = None
    return args

def validate_args(args, defaults={}):
    assert args.hidden_size % args.num_attention_heads == 0, "heads do not divide the hidden size"
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args

def parse_and_validate_args(extra_args_provider=None, ignore_unknown_args=False, args_defaults={}):
    args = parse_args(extra_args_provider, ignore_unknown_args)
    validate_args(args, args_defaults)
    set_global_variables(args)
    return args
"""
_CONFIG = """
import dataclasses

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig

def core_transformer_config_from_args(args, config_class=None):
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    # Dropout as Megatron has it, and messages that interleaved stages cannot use: settled by who trains with packs.
    return (config_class or TransformerConfig)(
        **{name: value for name, value in vars(args).items() if name in fields and value is not None},
        layernorm_epsilon=args.norm_epsilon,
        add_bias_linear=not args.disable_bias_linear,
        gated_linear_unit=True,
        activation_func=F.silu,
        deallocate_pipeline_outputs=True,
        pipeline_dtype=torch.float32,
    )
"""
_MODEL = """
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core import tensor_parallel

def build_gpt(args, config, pre_process, post_process):
    return GPTModel(
        config, get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"), args.padded_vocab_size,
        args.max_position_embeddings, pre_process=pre_process, post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type="rope", rotary_base=args.rotary_base,
    )

def mark(model):
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return [model]

class GPTModelConfig:
    def __init__(self, args, transformer):
        self.args, self.transformer = args, transformer

    def get_builder_cls(self):
        return Builder

class Builder:
    def __init__(self, config):
        self.config = config

    def build_distributed_models(self, pg_collection, wrap_with_ddp=True, model_type=None):
        assert not wrap_with_ddp
        pipeline = pg_collection.pp
        is_last = pipeline.rank() == pipeline.size() - 1
        return mark(build_gpt(self.config.args, self.config.transformer, pipeline.rank() == 0, is_last))
"""
_TRAINING = """
from megatron.core import parallel_state
from megatron.training.models import mark

def get_model(model_provider_func, model_type=None, wrap_with_ddp=True, config=None, pg_collection=None):
    assert not wrap_with_ddp
    return mark(model_provider_func(
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    ))

def pretrain({parameters}):
    raise AssertionError("pretraining")
"""
_PRETRAIN = {
    "0.16": "train_valid_test_dataset_provider, model_provider, model_type, forward_step_func, "
    "extra_args_provider=None, args_defaults={}",
    "0.18": "cfg_container, train_valid_test_dataset_provider, model_provider, model_type, forward_step_func",
    "0.19": "cfg_container, train_valid_test_dataset_provider, model_type, forward_step_func, model_provider=None",
}
_SCRIPT = '''"""Pretrain a GPT."""

import types

from megatron.training import get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.models import GPTModelConfig, build_gpt


def provide(pre_process=True, post_process=True):
    return build_gpt(get_args(), core_transformer_config_from_args(get_args()), pre_process, post_process)


def add_own(parser):
    parser.add_argument("--of-the-recipe", type=int, required=True)
    return parser


def never(*_):
    raise AssertionError("of pretraining")


if __name__ == "__main__":
'''
_CALLS = {
    "0.16": """    defaults = {"tokenizer_type": "X"}
    pretrain(never, provide, None, never, args_defaults=defaults, extra_args_provider=add_own)""",
    "0.18": """    from megatron.training.arguments import parse_and_validate_args
    parse_and_validate_args(extra_args_provider=add_own)
    pretrain(types.SimpleNamespace(model=None), never, provide, None, never)""",
    "0.19": """    from megatron.training.arguments import parse_and_validate_args
    args = parse_and_validate_args(extra_args_provider=add_own)
    model = GPTModelConfig(args, core_transformer_config_from_args(args))
    pretrain(types.SimpleNamespace(model=model), never, None, never)""",
}


def make_tree(folder: Path, shape: str) -> Path:
    """Write the tree; return the path of its script."""
    training = folder / "megatron" / "training"
    training.mkdir(parents=True)
    (folder / "megatron" / "core").symlink_to(find_core())
    files = {
        "__init__": _INIT,
        "global_vars": _GLOBAL_VARS,
        "arguments": _PARSER,
        "models": _MODEL,
        "training": _TRAINING.replace("{parameters}", _PRETRAIN[shape]),
    }
    if shape == "0.16":
        files["arguments"] += _CONFIG
    else:
        files["argument_utils"] = _CONFIG
        files["arguments"] += "\nfrom megatron.training.argument_utils import core_transformer_config_from_args\n"
    for name, text in files.items():
        (training / f"{name}.py").write_text(text)
    script = folder / "pretrain_gpt.py"
    script.write_text(f"{_SCRIPT}{_CALLS[shape]}\n")
    return script


def find_core() -> Path:
    """Return the folder of the installed megatron.core."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent
