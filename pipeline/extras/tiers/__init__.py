"""Train tables larger than memory on CPU ranks: some rows in memory, the other rows on a local SSD (docs/do/tiers.md)."""

FUNCTIONS = {
    "table_storage": "pipeline.extras.tiers.shard_tiers:ShardTiers.of",
    "tier_outlook": "pipeline.extras.tiers.outlook:tier_outlook",
}
