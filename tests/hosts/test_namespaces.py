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


def test_what_a_killed_test_left_answers_at_no_address_of_the_next_one(tmp_path: Path) -> None:
    code = "import sys, time; from tests.hosts.namespaces import network; f = network(1); f.__enter__(); print(); "
    code += "sys.stdout.flush(); time.sleep(600)"
    killed = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    assert killed.stdout is not None
    assert killed.stdout.readline() == b"\n"
    killed.kill()
    killed.wait()
    with network(1) as (host,):
        links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
        assert f"mrl{killed.pid}" not in links
        assert host.namespace in links
