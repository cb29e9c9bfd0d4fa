"""Check the nodes of a job before it runs for long: links, clocks, software, GPUs and the folder that they share."""
