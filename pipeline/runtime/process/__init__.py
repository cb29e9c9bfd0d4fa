"""Run ranks: the launcher's agent, the watchdog, signals and processes."""
