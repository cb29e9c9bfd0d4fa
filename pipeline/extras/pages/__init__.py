"""Compare two plans, and draw pages and charts: a plan, a predicted step, a registry. Each page is one HTML file that opens from disk."""

FUNCTIONS = {
    "compare_plans": "pipeline.extras.pages.compare:compare",
    "write_plan_page": "pipeline.extras.pages.plan_page:write_plan_page",
    "render_registry": "pipeline.extras.pages.registry_page:render_registry",
}
