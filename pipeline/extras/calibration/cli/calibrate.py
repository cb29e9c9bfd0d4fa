"""Measure this machine, so that plan can predict steps on it:  python -m pipeline calibrate
name=my_machine

It takes about `seconds` (250) seconds, and needs an idle machine. It times small trainings on CPU ranks; a step
on GPUs is predicted from the data sheet. It writes conf/hardware/<name>.yaml and the measurements.
Then run python -m pipeline plan experiment=quickstart hardware=my_machine
"""

from __future__ import annotations

from pipeline.cli.verb import verb
from pipeline.extras.calibration.job import CalibrateJob
from pipeline.runtime.storage import storage


def run(job: CalibrateJob) -> str:
    """Return a description of what was measured and where it was written.

    Raises TrainingError if the machine was busy.
    """
    from pipeline.extras.calibration.hardware_file import describe, hardware_yaml
    from pipeline.extras.calibration.run import calibrate

    path = job.output or f"conf/hardware/{job.name}.yaml"
    measurements = f"{path.removesuffix('.yaml')}.json"
    measured = calibrate(job)
    storage.publish_text(measurements, measured.to_json())
    storage.publish_text(path, hardware_yaml(measured, measurements))
    return f"{describe(measured)}\nmeasurements  {measurements}\nhardware      {path}"


def _written_to(job: CalibrateJob) -> str:
    return job.output or "conf/hardware"


main = verb("calibrate", CalibrateJob, describe=str, written_to=_written_to, runs_kernels=True)(run)
