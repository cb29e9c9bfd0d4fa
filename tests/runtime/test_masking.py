"""Credentials leave neither in what we print nor in what we save."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.train import TrainJob
from pipeline.runtime.masking import find_secret, mask
from pipeline.runtime.process.failures import describe_os_error
from tests.support.messages import names


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("cannot read s3://AKIAXXXX:hunter22@bucket/key: 403", "hunter22"),
        ("GET https://bucket.s3.amazonaws.com/a?X-Amz-Signature=abcdef123&X-Amz-Date=1", "abcdef123"),
        ("https://host/path?sv=1&sig=qwertyui%3D", "qwertyui"),
        ("https://host/?access_token=0123456789", "0123456789"),
        ("the key is canary-in-the-environment", "canary-in-the-environment"),
    ],
)
def test_credentials_are_hidden(text: str, hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-in-the-environment")
    assert hidden not in mask(text) and "***" in mask(text)


@pytest.mark.parametrize("text", ["s3://bucket/key", "runs/a@b", "https://host/a?page=2", "tables={a: {b: c}}", ""])
def test_other_text_stays(text: str) -> None:
    assert mask(text) == text


def test_a_job_that_holds_a_credential_is_refused_and_the_message_does_not_tell_it() -> None:
    with pytest.raises(ValueError, match=names("data.path AWS_ACCESS_KEY_ID")) as error:
        load_config(TrainJob, ["experiment=quickstart", "data.path=s3://me:canary123@bucket/data"])
    assert "canary123" not in str(error.value)
    assert find_secret({"a": {"b": ["x", "s3://u:p@h"]}}) == "a.b[1]"


def test_errors_of_the_system_are_one_line_with_path_and_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code = (
        "from pipeline.cli.command_line import print_user_errors\nfrom pipeline.config.jobs.prepare import PrepareJob\n"
        f"with print_user_errors('there'): open('{tmp_path}/file/inside', 'w')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: Not a directory (") and "file/inside" in done.stderr
    assert describe_os_error(OSError(28, "No space left on device"), "runs/x") == (
        "No space left on device (runs/x); free some space, or choose a folder on another disk"
    )
    assert describe_os_error(ConnectionResetError(104, "reset")) == ""  # no user's fault: it keeps its traceback


def test_a_full_disk_is_said_in_the_systems_words_whichever_library_met_it() -> None:
    error = OSError(28, "Error writing bytes to file. Detail: [errno 28] No space left on device")
    assert describe_os_error(error, "data").startswith("No space left on device (data); free some space")
