"""Hosts with files of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.namespaces import INSIDE, network
from tests.processes import ROOT

pytestmark = pytest.mark.each_change


def test_a_host_has_a_temporary_folder_of_its_own_and_the_clone_wherever_that_is(tmp_path: Path) -> None:
    own = Path("/tmp") / f"of-a-host-{tmp_path.parent.name}"
    code = "import pathlib, sys, tests; print(tests.__file__); [pathlib.Path(name).touch() for name in sys.argv[1:]]"
    with network(1, tmp_path) as (host,):
        words = [sys.executable, "-c", code, str(own), str(INSIDE / "seen")]
        for _ in range(2):
            process = host.popen(words, stdout=subprocess.PIPE, text=True)
            assert process.communicate()[0] == f"{ROOT / 'tests' / '__init__.py'}\n"
            assert process.returncode == 0
            assert (not own.exists(), (host.folder / "seen").exists()) == (True, True)
            host.restart()
