"""Train a replica of the tables on each host, and average the replicas every few steps
(parallel.embedding_sync).
"""

COMPONENTS = {"hook": "pipeline.extras.embedding_sync.hook"}
FUNCTIONS = {
    "host_environment": "pipeline.extras.embedding_sync.replicas:host_environment",
    "plan_for_host": "pipeline.extras.embedding_sync.replicas:plan_for_host",
    "replicates": "pipeline.extras.embedding_sync.replicas:replicates",
    "table_replicas": "pipeline.extras.embedding_sync.replicas:TableReplicas",
}
