"""Small tensors that a rank owns whole are written together, as they would be one by one."""

from pathlib import Path

import torch

from megatron_rl.shared.weights import files
from megatron_rl.shared.weights.mapping import Piece, ShardMap, TensorSpec
from megatron_rl.shared.weights.shards import Shard, divide_small

SHAPES = {"a": (4, 8), "b": (3,), "c": (2, 2), "d": (5, 5), "e": (400, 400), "f": (6, 2)}


def build_shards(dtype: torch.dtype) -> list[Shard]:
    torch.manual_seed(0)
    shards = []
    for name, shape in SHAPES.items():
        # Of one tensor this rank owns a part, and of another nothing.
        rows = shape[0] - 2 if name == "c" else shape[0]
        piece = Piece(name, 0, 0, 0, rows)
        values = torch.randn(rows, *shape[1:]).to(dtype)
        shards.append(Shard(name, values, ShardMap((rows, *shape[1:]), (piece,), owned=name != "f")))
    return shards


def test_tensors_that_are_written_together_lie_where_each_would(tmp_path: Path) -> None:
    specs = [TensorSpec(name, shape, "bfloat16" if name == "d" else "float32") for name, shape in SHAPES.items()]
    plan = files.FilePlan(specs)
    shards = build_shards(torch.float32)
    batches, others = divide_small(shards, plan.specs)
    (small,) = batches
    assert [name for name, _ in small] == ["a", "b", "d"]
    assert [shard.parameter_name for shard in others] == ["c", "e", "f"]
    contents = []
    for is_together in (True, False):
        folder = tmp_path / f"{is_together}"
        files.create(folder, plan)
        with files.Writer(folder, plan) as writer:
            if is_together:
                writer.put_whole(small[::-1])
            else:
                for name, tensor in small:
                    writer.put(name, 0, 0, tensor)
        contents.append((folder / "model.safetensors").read_bytes())
    assert contents[0] == contents[1]
    assert not any(contents[0][-16:])
