"""Mirror the ledger's records as runs on an MLflow server. Nothing is read from it.

Only the ledger counts: if the mirror is unavailable, a warning is logged.
"""

from __future__ import annotations

from pipeline.retraining.ledger import Record
from pipeline.runtime.errors import RetrainingError
from pipeline.runtime.logs import get_logger

logger = get_logger("pipeline.retrain")


def mirror_record(uri: str, experiment: str, record: Record) -> None:
    """Write one finished MLflow run per record: metrics as metrics, other fields as tags.

    Raises RetrainingError if MLflow is not installed.
    """
    try:
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise RetrainingError(
            "registry.mlflow needs MLflow: pip install 'torchrec-pipeline[mlflow]', or remove registry.mlflow"
        ) from error
    try:
        client = MlflowClient(tracking_uri=uri)
        found = client.get_experiment_by_name(experiment)
        number = found.experiment_id if found else client.create_experiment(experiment)
        name = f"{record.window or record.version} {record.state}"
        run = client.create_run(number, run_name=name, tags=_tags(record))
        for key, value in record.metrics.items():
            if isinstance(value, (int, float)):
                client.log_metric(run.info.run_id, key, float(value))
        client.set_terminated(run.info.run_id)
    except Exception as error:  # any error of a server or its database
        logger.warning("the mirror %s did not accept record %d: %s", uri, record.number, error)


def _tags(record: Record) -> dict[str, str]:
    tags = {
        name: getattr(record, name) for name in ("state", "window", "version", "parent", "config_hash", "code_version")
    }
    return {**tags, "record": str(record.number), "reasons": "; ".join(record.reasons)}
