"""Erase a value, for example a user, from models, data sets and logs, and prove it: the verb `erase`."""
