"""More models: AutoInt, xDeepFM, GDCN, MaskNet, FinalMLP, FinalNet, Wukong, DIEN, BST, HSTU, several sequence encoders, SASRec, and the models of several labels (shared bottom, MMoE, PLE, ESMM, DBMTL, PEPNet).

Each file is one model, as in pipeline/models, and uses the layers, tasks and base classes of the core.
"""

COMPONENTS = {
    "model": "pipeline.extras.models",
    "task": "pipeline.extras.models.tasks",
    "metric": "pipeline.extras.models.metrics",
    "hook": "pipeline.extras.models.tasks.item_index",
    "loss": "pipeline.extras.models.tasks.regression_losses",
}
