"""The verbs `runs` and `report`."""
