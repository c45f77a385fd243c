"""Names are removed from the memory that workers share, and from no other memory."""

import mmap
from pathlib import Path

from megatron_rl.sidecar.vllm.patches import take_names_off


def test_memory_that_is_mapped_here_keeps_its_content_and_loses_its_name(tmp_path: Path) -> None:
    names = ("vllm_dist_mine", "psm_other", "vllm_dist_of_others")
    for name in names:
        (tmp_path / name).write_bytes(b"x" * mmap.PAGESIZE)
    opened = [(tmp_path / name).open("r+b") for name in names[:2]]
    mapped = [mmap.mmap(file.fileno(), mmap.PAGESIZE) for file in opened]
    assert take_names_off(folder=tmp_path) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"psm_other", "vllm_dist_of_others"}
    assert mapped[0][0] == ord("x")
    # Another worker of the same engine comes second.
    assert take_names_off(folder=tmp_path) == 0
    for thing in (*mapped, *opened):
        thing.close()
