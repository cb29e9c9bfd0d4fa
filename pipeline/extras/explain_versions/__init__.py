"""Say why two versions of a model score the same rows differently: the verb `explain`, and `registry explain`."""

FUNCTIONS = {"explain_versions": "pipeline.extras.explain_versions.cli.explain:explain_in_registry"}
