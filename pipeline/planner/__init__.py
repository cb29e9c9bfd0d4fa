"""Plan how the tables of a model are sharded over given hardware."""
