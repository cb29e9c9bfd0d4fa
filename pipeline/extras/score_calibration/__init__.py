"""Calibrate the scores of an artifact: Platt scaling or isotonic regression (docs/do/serving.md)."""

FUNCTIONS = {
    "calibrate_artifact": "pipeline.extras.score_calibration.export:calibrate_artifact",
    "describe_calibration": "pipeline.extras.score_calibration.certificate:describe_calibration",
    "open_calibration": "pipeline.extras.score_calibration.calibration:open_calibration",
    "refit_calibration": "pipeline.extras.score_calibration.export:refit_calibration",
}
