"""A shell script is read as a shell would run it, and none of it is run."""

import pytest

from megatron_rl.migrate.shell_script import read_shell_script


@pytest.mark.parametrize(
    ("script", "commands"),
    [
        ("A=1; run $A ${A} ${B:-2} ${A:+x}", [["run", "1", "1", "2", "x"]]),
        ("A=(a 'b c'); A+=(d); run \"${A[@]}\"", [["run", "a", "b c", "d"]]),
        ("A='--x 1\n  --y 2'; run $A \"$A\"", [["run", "--x", "1", "--y", "2", "--x 1\n  --y 2"]]),
        ("A=\"--x $1\"; A=\"$A --y\"; run $A", [["run", "--x", "small", "--y"]]),
        ("if [ $1 = big ]; then N=8; elif [ $1 = small ]; then N=1; else N=0; fi; run $N", [["run", "1"]]),
        ("if [ -z ${A} ] && [[ 2 -gt 1 ]]; then B=$((2 * 3 / 4)); else B=9; fi; run $B", [["run", "1"]]),
        ("for ((i=0; i<3; i++)); do a+=($((i > 0 ? 1 : 0))); done; run $(IFS=,; echo \"${a[*]}\")", [["run", "0,1,1"]]),
        ("for a in x y; do run $a; done", [["run", "x"], ["run", "y"]]),
        ("case $1 in big) N=8;; small) N=2;; *) N=1;; esac; run $N", [["run", "2"]]),
        ("f() { run no; }\nrun yes > log 2>&1 &", [["run", "yes"]]),
        ("cat <<END\nrun no\nEND\nrun yes", [["cat"], ["run", "yes"]]),
        ("C=\"run --x $UNSET\"; eval $C # comment", [["run", "--x", "$UNSET"]]),
        ("if false; then C=1; fi; run a ${C} b", [["run", "a", "b"]]),
        ("run $(date +%s) `date -u`", [["run", "$(date +%s)", "`date -u`"]]),
        ("while true; do run no; done; run yes", [["run", "yes"]]),
        ("cd /tmp && run \\\n  --a \\\n  --b", [["cd", "/tmp"], ["run", "--a", "--b"]]),
        ("printf -v F \"[%s]\" \"1,1\"; run $F", [["run", "[1,1]"]]),
        ("run $(dirname a/b/c) $(basename a/b)", [["run", "a/b", "b"]]),
    ],
)  # fmt: skip
def test_a_script_comes_to_the_commands_that_a_shell_would_run(script: str, commands: list[list[str]]) -> None:
    assert read_shell_script(script, arguments=["small"]).commands == commands


def test_a_file_that_is_sourced_is_read_where_it_is() -> None:
    files = {"dir/model.sh": "MODEL=(--num-layers $N)"}
    script = read_shell_script("N=4; source dir/model.sh; run ${MODEL[@]}", read_file=files.get)
    assert script.commands == [["run", "--num-layers", "4"]]
    assert script.variables["MODEL"] == ["--num-layers", "4"]


def test_a_script_that_sources_or_evaluates_itself_ends() -> None:
    assert read_shell_script("source me; run", read_file=lambda path: "source me; run").commands[-1] == ["run"]
    assert read_shell_script("A='eval $A; run'; eval $A").commands
