"""Plan how tables are sharded over ranks, and read and write plan files."""
