"""Send training metrics to Prometheus, OpenTelemetry, MLflow and Weights & Biases, and registry records to MLflow."""

COMPONENTS = {"hook": "pipeline.extras.monitoring.hooks", "tracker": "pipeline.extras.monitoring.trackers"}
FUNCTIONS = {"mirror_record": "pipeline.extras.monitoring.mlflow_mirror:mirror_record"}
