"""Predict how long a planned step takes, from a calibration or from the hardware's data sheet, for the verb `plan`.

The core plans without it. `planner.objective=step_time`, `target.*`, `what_if=true` and several
world sizes need it. `python -m pipeline calibrate` measures the rates (the extra `calibration`).
"""

FUNCTIONS = {
    "foresee": "pipeline.extras.step_time.plan_forecast:foresee",
    "reach_target": "pipeline.extras.step_time.plan_target:reach_target",
    "refine_plan": "pipeline.extras.step_time.refine:refine",
    "step_cost_of": "pipeline.extras.step_time.plan_forecast:step_cost_of",
}
