"""`python -m pipeline.agent`, as rendered scripts and manifests call it; it is pipeline/runtime/process/agent.py."""

from pipeline.runtime.process.agent import main

if __name__ == "__main__":
    main()
