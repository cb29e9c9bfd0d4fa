"""Measure what this machine's operations take, for plan to predict steps by:  python -m pipeline calibrate name=my_machine

Takes job.seconds (240), and wants the machine for itself. It measures CPU ranks; a step on GPUs is predicted from their
data sheet. Writes conf/hardware/<name>.yaml and the table of measurements;
then:  python -m pipeline plan experiment=quickstart hardware=my_machine
"""

from __future__ import annotations

from pipeline.cli.verb import verb
from pipeline.config.jobs.machine import CalibrateJob
from pipeline.runtime.storage import storage


def run(job: CalibrateJob) -> str:
    """What was measured, and where it was written. Raises TrainingError where the machine was busy."""
    from pipeline.planner.step_time.hardware_file import describe, hardware_yaml
    from pipeline.training.calibration.run import calibrate

    path = job.output or f"conf/hardware/{job.name}.yaml"
    measurements = f"{path.removesuffix('.yaml')}.json"
    measured = calibrate(job)
    storage.publish_text(measurements, measured.to_json())
    storage.publish_text(path, hardware_yaml(measured, measurements))
    return f"{describe(measured)}\nmeasurements  {measurements}\nhardware      {path}"


main = verb(
    "calibrate", CalibrateJob, describe=str, written_to=lambda job: job.output or "conf/hardware", runs_kernels=True
)(run)
