"""Train tables larger than memory on CPU ranks: some rows in memory, the other rows on a local SSD (docs/do/tiers.md)."""

FUNCTIONS = {
    "check_tiers": "pipeline.extras.tiers.checks:check_tiers",
    "slots_for": "pipeline.extras.tiers.slots:slots_for",
    "table_storage": "pipeline.extras.tiers.shard_tiers:ShardTiers.of",
    "tier_clock": "pipeline.extras.tiers.rates:TierClock",
    "tier_folder": "pipeline.extras.tiers.rates:tier_folder",
    "tier_forecast": "pipeline.extras.tiers.forecast:forecast",
    "tier_memory_bytes": "pipeline.extras.tiers.forecast:memory_bytes",
    "tier_outlook": "pipeline.extras.tiers.outlook:tier_outlook",
    "with_tiers": "pipeline.extras.tiers.slots:with_tiers",
}
