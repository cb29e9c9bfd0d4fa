"""Turn a job into a TorchX AppDef: composed and validated here, run wherever a TorchX scheduler puts it."""
