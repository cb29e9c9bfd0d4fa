"""Train narrow stacks of linear layers in fp32 by one kernel each, on CPUs with AVX-512
(docs/adr/0052-narrow-stacks.md).
"""

FUNCTIONS = {"speed_up_stacks": "pipeline.extras.narrow_stacks.stack:speed_up_stacks"}
