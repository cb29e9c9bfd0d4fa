"""The verb of sweeps."""
