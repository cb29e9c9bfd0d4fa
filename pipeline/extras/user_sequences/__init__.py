"""Read files with a line for each user, `user item item ...` in the order of time, and leave the last items out for validation and test.

`data=user_sequences` reads such a file, and `experiment=user_sequences_sasrec` retrieves the next item.
"""

COMPONENTS = {"format": "pipeline.extras.user_sequences.format"}
