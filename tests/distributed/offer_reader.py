"""A process that reads offers as an engine does: it copies all pieces, and compares digests with those in the folder.

It reads folders from its input, a line each, and answers with a line of JSON each. If a word follows the folder's name,
it holds the offer until it reads another line.
"""

import json
import sys
from pathlib import Path

import torch

from megatron_rl.shared.weights.files import read_digests
from megatron_rl.shared.weights.fingerprint import DTYPES, compute_fingerprint, digest
from megatron_rl.shared.weights.offer import taken
from megatron_rl.sidecar.vllm.in_place import OpenedMemory, OpenedOffer
from tests.offers import HostSharing


def assemble(opened: OpenedOffer) -> dict[str, torch.Tensor]:
    """Copy every tensor; elements that no piece covers are not numbers."""
    found = {}
    for spec in opened.specs:
        whole_RC = torch.full((spec.shape[0], spec.num_elements // spec.shape[0]), torch.nan, dtype=DTYPES[spec.dtype])
        for piece in opened.pieces[spec.name]:
            row, column, num_rows, num_columns = piece.rectangle
            whole_RC[row : row + num_rows, column : column + num_columns].copy_(piece.held_RC)
        found[spec.name] = whole_RC.view(spec.shape)
    return found


def main() -> None:
    sharing = HostSharing()
    memory = OpenedMemory(sharing)
    for line in sys.stdin:
        name, _, held = line.strip().partition(" ")
        folder = Path(name)
        with taken(folder) as offer:
            if held:
                print("held", flush=True)
                sys.stdin.readline()
            if offer is None:
                print(json.dumps({"is_offered": False}), flush=True)
                continue
            opened, digests = memory.open(offer), read_digests(folder)
            tensors = assemble(opened)
        wrong = [name for name, tensor in tensors.items() if digest(tensor).tolist() != digests[name]]
        is_announced = compute_fingerprint(opened.specs, digests) == offer.fingerprint
        answer = {
            "is_offered": True,
            "is_announced": is_announced,
            "wrong": wrong,
            "num_opened": sharing.num_opened,
            "num_bytes": sum(tensor.nbytes for tensor in tensors.values()),
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
