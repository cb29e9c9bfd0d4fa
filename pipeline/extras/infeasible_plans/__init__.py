"""Explain why no plan holds the tables: which ranks lack memory, and which changed settings would
fit (docs/do/planning.md).
"""

FUNCTIONS = {"explain_infeasible": "pipeline.extras.infeasible_plans.explain:explain_infeasible"}
