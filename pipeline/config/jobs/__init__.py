"""Schemas of jobs: one dataclass per verb, composed of the schemas of its parts (stdlib and
OmegaConf only)."""
