"""Say what is wrong with a trained model, from its run folder and its data set: the verb `diagnose`."""

COMPONENTS = {"hook": "pipeline.extras.diagnose.hook"}
FUNCTIONS = {"diagnose": "pipeline.extras.diagnose.rules:try_diagnose"}
