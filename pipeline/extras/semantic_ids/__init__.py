"""Make short codes of vectors as features: the verb `semantic_ids`, and the transform of this name."""

COMPONENTS = {"transform": "pipeline.extras.semantic_ids.transform"}
