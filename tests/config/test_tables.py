"""What a job's tables may ask for."""

from __future__ import annotations

import pytest

from pipeline.cli.command_line import load_config
from pipeline.config.jobs import PlanJob
from pipeline.runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("tables.cat_3.sharding.compute_kernels=[key_value]", "fused_uvm_caching"),
        ("tables.cat_3.sharding.compute_kernels=[fused, key_value]", "fused_uvm_caching"),
        ("hardware.ssd_cap_gb=1000", "Leave it 0"),
    ],
)
def test_a_kernel_that_fbgemm_lacks_is_refused_by_name(override: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"FBGEMM has no .*kernel.*FBGEMM/issues/5666.*{hint}"):
        load_config(PlanJob, ["experiment=quickstart", "hardware=h200", override])
