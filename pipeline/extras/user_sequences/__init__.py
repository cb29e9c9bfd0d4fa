"""Read files with a line for each user, `user item item ...` in the order of time, and leave the last items out for validation and test.

`data.format=user_sequences`; data=amazon_beauty and data=amazon_toys are examples.
"""

COMPONENTS = {"format": "pipeline.extras.user_sequences.format"}
