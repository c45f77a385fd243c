"""Other packages' warnings stay out of the output that a person watches, and none is lost."""

import logging
import warnings

from megatron_rl.observe.run_folder import keep_warnings


def test_warnings_and_logged_ones_are_in_the_file_and_said_once(tmp_path, capfd, recwarn):
    path, said = tmp_path / "warnings.log", []
    with keep_warnings(path, said.append):
        warnings.warn("this will be removed", FutureWarning, stacklevel=1)
        logging.getLogger("some.package").warning("half of it is slow")
        logging.getLogger("some.package").info("nothing to see")
    text = path.read_text()
    assert "FutureWarning: this will be removed" in text
    assert "some.package WARNING half of it is slow" in text
    assert "nothing to see" not in text
    assert said == [f"other packages have warnings: {path} (--verbose shows them here)"]
    assert capfd.readouterr() == ("", "")


def test_without_a_warning_no_file_is_written(tmp_path):
    with keep_warnings(tmp_path / "warnings.log", lambda text: None):
        pass
    assert not list(tmp_path.iterdir())


def test_warnings_are_printed_when_the_file_cannot_be_written(tmp_path, capfd):
    with keep_warnings(tmp_path / "absent" / "warnings.log", lambda text: None):
        logging.getLogger("some.package").warning("half of it is slow")
    assert "half of it is slow" in capfd.readouterr().err


def test_after_the_context_warnings_go_where_they_went_before(tmp_path):
    before = logging.getLogger().handlers[:], warnings.showwarning
    with keep_warnings(tmp_path / "warnings.log", lambda text: None):
        assert warnings.showwarning is not before[1]
    assert (logging.getLogger().handlers, warnings.showwarning) == before
