"""Credentials leave neither in what we print nor in what we save."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.cli.command_line import load_config
from pipeline.config.jobs.train import TrainJob
from pipeline.config.saved_jobs import load_saved_job, plain_values, save_job
from pipeline.runtime.masking import SECRET_NAME, find_secret, for_log, mask, one_line, printable
from pipeline.runtime.process.failures import describe_os_error
from pipeline.training.run_state import describe_job
from tests.support.datasets import described_dataset
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


# Variables in which tools that this project meets take their credentials.
SECRET_NAMES = [
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_ACCESS_KEY_ID",
    "AZURE_CLIENT_SECRET",
    "AZURE_STORAGE_KEY",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_STORAGE_SAS_TOKEN",
    "GOOGLE_API_KEY",
    "GOOGLE_CREDENTIALS",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "WANDB_API_KEY",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "COMET_API_KEY",
    "NEPTUNE_API_TOKEN",
    "CLEARML_API_SECRET_KEY",
    "DATABRICKS_TOKEN",
    "SNOWFLAKE_PASSWORD",
    "SNOWFLAKE_PRIVATE_KEY_PASSPHRASE",
    "PGPASSWORD",
    "MYSQL_PWD",
    "REDIS_PASSWORD",
    "REDISCLI_AUTH",
    "RABBITMQ_DEFAULT_PASS",
    "KAFKA_SASL_PASSWORD",
    "KAFKA_SASL_JAAS_CONFIG",
    "SMTP_PASS",
    "SENTRY_DSN",
    "SLACK_WEBHOOK_URL",
    "TEAMS_WEBHOOK",
    "DISCORD_WEBHOOK_URL",
    "HC_PING_URL",
    "PAGERDUTY_ROUTING_KEY",
    "PAGERDUTY_INTEGRATION_KEY",
    "DD_API_KEY",
    "DD_APP_KEY",
    "NEW_RELIC_LICENSE_KEY",
    "SPLUNK_HEC_TOKEN",
    "OTEL_EXPORTER_OTLP_HEADERS",
    "GITHUB_TOKEN",
    "GITLAB_PRIVATE_TOKEN",
    "CI_JOB_TOKEN",
    "NPM_TOKEN",
    "TWINE_PASSWORD",
    "DOCKER_AUTH_CONFIG",
    "NGC_API_KEY",
    "VAULT_TOKEN",
    "SSH_PRIVATE_KEY",
    "GPG_PASSPHRASE",
    "AIRFLOW__CORE__FERNET_KEY",
    "FLASK_SECRET_KEY",
    "MINIO_ROOT_PASSWORD",
    "B2_APPLICATION_KEY",
    "OAUTH_CLIENT_SECRET",
    "HTTP_PROXY_AUTH",
    "TWILIO_AUTH_TOKEN",
    "OPENAI_API_KEY",
    "SESSION_COOKIE",
]
OTHER_NAMES = [
    "PATH",
    "PWD",
    "OLDPWD",
    "HOME",
    "GIT_AUTHOR_NAME",
    "GIT_AUTHOR_EMAIL",
    "KEYBOARD_LAYOUT",
    "COMPASS_HEADING",
    "PASSENGER_COUNT",
    "OMP_NUM_THREADS",
    "HF_HOME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "WANDB_PROJECT",
    "SORT_KEY",
    "PARTITION_KEY",
    "SASL_MECHANISM",
    "AUTHORS",
    "SLURM_JOB_ID",
    "TORCHELASTIC_RUN_ID",
]


def test_names_of_secrets_are_known() -> None:
    assert len(SECRET_NAMES) >= 50
    assert [name for name in SECRET_NAMES if not SECRET_NAME.search(name)] == []
    assert [name for name in OTHER_NAMES if SECRET_NAME.search(name)] == []


def test_a_webhook_is_neither_saved_nor_logged(tmp_path: Path) -> None:
    url = "https://hooks.example.com/services/T000/canary-path"
    job = load_config(TrainJob, ["experiment=quickstart", f"logger.heartbeat_url={url}"])
    assert job.logger.heartbeat_url == url
    save_job(job, str(tmp_path / "config.yaml"))
    saved = (tmp_path / "config.yaml").read_text()
    about = describe_job(job, described_dataset({"cat_0": 10}), {}, {"plan": {}, "fingerprint_sha256": ""})
    assert "canary-path" not in saved + str(about) and about["config"] == plain_values(saved)
    assert load_saved_job(TrainJob, str(tmp_path / "config.yaml")).logger.heartbeat_url is None
    assert mask(f"POST {url}: 404 at /services/T000/canary-path") == "POST ***: 404 at ***"


CONTROL = "a\x1b]0;title\x07\x9b2Jb\u202ec\r12:00:00 step 100"


def test_control_characters_are_shown_not_obeyed() -> None:
    assert printable(CONTROL) == r"a\x1b]0;title\x07\x9b2Jb\u202ec\r12:00:00 step 100"
    assert printable("tab\there, two\nlines, häuser 東京") == "tab\there, two\nlines, häuser 東京"
    assert one_line("a\nb") == r"a\nb"
    assert for_log("no file 'x\n12:00:00 saved'") == "no file 'x\n    12:00:00 saved'"


def test_a_name_with_control_characters_forges_no_log_line() -> None:
    code = (
        "import logging\nfrom pipeline.runtime.logs import configure_logging\nconfigure_logging()\n"
        "from pipeline.cli.command_line import print_user_errors\nfrom pipeline.runtime.errors import DataError\n"
        "name = 'x\\n12:00:00 step 100\\x1b[2J'\nlogging.getLogger('pipeline').warning('read %s', name)\n"
        "with print_user_errors(): raise DataError(f'{name}: no such file')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "\x1b" not in done.stderr
    assert done.stderr.count(r"\x1b[2J") == 2 and done.stderr.count("\n    12:00:00 step 100") == 2
