"""Launch jobs on schedulers: composed and validated here, run wherever a scheduler puts them."""
