"""Files that a launch writes beside the run, and the program of the scheduler that takes them."""

import secrets
import shlex
import shutil
import string
import subprocess
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.errors import PlatformError
from megatron_rl.shared.records.append_file import make_private_folder, write_private

HOSTS_FILE = "hosts.toml"
TOKEN_FILE = "token"


class _Template(string.Template):
    # Scripts have dollars of their own.
    delimiter = "@"


def fill_template(file: str, /, **values: object) -> str:
    """Return a file of the folder `templates` with `@name` replaced by the value of that name."""
    text = Path(__file__).with_name("templates").joinpath(file).read_text(encoding="utf-8")
    return _Template(text).substitute(values)


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
