"""Estimate from a log what serving by a model would earn: `evaluate policy=...`, and `gate.policy` of retrain."""

FUNCTIONS = {
    "check_policy": "pipeline.extras.off_policy.settings:check_policy",
    "judge_policy": "pipeline.extras.off_policy.gate:judge_policy",
    "policy_rows": "pipeline.extras.off_policy.rows:PolicyRows",
}
