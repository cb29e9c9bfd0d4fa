"""Check the nodes of a job before a long run: links, clocks, software, GPUs and the shared folder."""
