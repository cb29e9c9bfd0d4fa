"""Turn a model, hardware and data statistics into a ShardingPlan, and a plan into a file."""
