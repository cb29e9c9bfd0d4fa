"""Prove tighter lower bounds of plans, by patterns of the tables on one rank (docs/adr/0061). The search works without it."""

FUNCTIONS = {
    "can_bound_plans": "pipeline.extras.plan_bounds.patterns:can_bound",
    "prove_bounds": "pipeline.extras.plan_bounds.patterns:prove_bounds",
}
