"""Measure what a training run costs, and end it when a budget is used up: run_dir/cost.json, and the keys `budget.*`."""

COMPONENTS = {"hook": "pipeline.extras.price.hook"}
FUNCTIONS = {
    "cost_of_run": "pipeline.extras.price.cost:cost_of_run",
    "describe_cost": "pipeline.extras.price.cost:describe_cost",
}
