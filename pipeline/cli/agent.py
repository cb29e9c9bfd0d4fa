"""Start the ranks of a job on this host, as torchrun does:  python -m pipeline agent --nproc-per-node 2 -m pipeline train experiment=quickstart"""

from __future__ import annotations

from pipeline.runtime.process import agent

main = agent.main
