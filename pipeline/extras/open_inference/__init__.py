"""Answer the Open Inference Protocol (KServe v2) as JSON on the server (docs/do/serving.md)."""

FUNCTIONS = {"server_routes": "pipeline.extras.open_inference.routes:routes"}
