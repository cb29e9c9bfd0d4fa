"""Explain why no plan holds the tables: which ranks lack memory, and settings that were tried and fit
(docs/do/planning.md).
"""

FUNCTIONS = {"explain_infeasible": "pipeline.extras.infeasible_plans.explain:explain_infeasible"}
