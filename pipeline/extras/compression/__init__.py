"""Compress tables in rarer ways: tensor trains, path-based rows, coprime remainders and given
partitions. Report what compression saves.
"""

COMPONENTS = {"compression": "pipeline.extras.compression"}
FUNCTIONS = {
    "partitions_of": "pipeline.extras.compression.partitions:partitions_of",
    "report_savings": "pipeline.extras.compression.describe:report_savings",
}
