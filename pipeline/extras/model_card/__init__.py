"""Write a model card with each artifact, for people and as JSON (docs/do/serving.md)."""

FUNCTIONS = {
    "card_of_artifact": "pipeline.extras.model_card.show:card_of_artifact",
    "card_sections": "pipeline.extras.model_card.markdown:sections",
    "describe_artifact": "pipeline.extras.model_card.write:describe_artifact",
    "measure_artifact": "pipeline.extras.model_card.measure:measure_artifact",
}
