"""Files that a launch writes beside the run, and the program of the scheduler that takes them."""

import secrets
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.errors import PlatformError
from megatron_rl.shared.records.append_file import make_private_folder, write_private

HOSTS_FILE = "hosts.toml"
TOKEN_FILE = "token"


def write_hosts(folder: Path, text: str) -> str:
    """Write the file of hosts and the agents' token, which is made once, and return the token."""
    make_private_folder(folder)
    token = folder / TOKEN_FILE
    if not token.exists():
        write_private(token, f"{secrets.token_hex(32)}\n".encode())
    (folder / HOSTS_FILE).write_text(text)
    return token.read_text().strip()


def submit(words: Sequence[str], is_dry: bool) -> None:
    """Run the scheduler's program, or print how to run it."""
    if is_dry:
        print(f"nothing was started: {shlex.join(words)} starts it")
        return
    if shutil.which(words[0]) is None:
        raise PlatformError(f"{words[0]} is not found here: run {shlex.join(words)} on a host that has it")
    code = subprocess.run(words, check=False).returncode
    if code:
        raise PlatformError(f"{shlex.join(words)} has failed with exit code {code}: see what it has printed")
