"""Schemas of jobs: one dataclass a verb, made of the schemas of its parts (stdlib and OmegaConf only)."""
