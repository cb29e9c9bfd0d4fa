"""What happens around training steps, each concern a hook: logging, profiling, evaluation, saving, rollback."""
