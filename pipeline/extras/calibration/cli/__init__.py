"""The verb of the calibration."""
