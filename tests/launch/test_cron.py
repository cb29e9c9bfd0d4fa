"""A cron expression that passes means the same to cron, Slurm and Kubernetes; any other is explained."""

from __future__ import annotations

import pytest

from launch.cron import parse_cron
from tests.support.messages import names


@pytest.mark.parametrize(
    ("typed", "written"),
    [
        ("0 * * * *", "0 * * * *"),
        ("  */15  0-6 1,15 * 1-5 ", "*/15 0-6 1,15 * 1-5"),
        ("5-55/10 3 * jan-MAR,dec Sun", "5,15,25,35,45,55 3 * 1-3,12 0"),
        ("0 */2 */10 * */2", "0 */2 1,11,21,31 * 0,2,4,6"),  # Slurm counts steps of days from Monday
        ("*/1 5,* * * 0-6", "* * * * 0-6"),
        ("@hourly", "0 * * * *"),
        ("@Weekly", "0 0 * * 0"),
        ("0 0 29 2 *", "0 0 29 2 *"),
        ("0 0 31 2 1", "0 0 31 2 1"),  # Mondays of February
        ("007 00 1 1 0", "7 0 1 1 0"),
    ],
)
def test_an_expression_is_written_in_numbers(typed: str, written: str) -> None:
    assert parse_cron(typed) == written
    assert parse_cron(written) == written


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("0 * * *", "4 5"),
        ("0 0 * * * *", "6 5"),
        ("", "0 5"),
        ("@reboot", "1 5"),
        ("60 * * * *", "60 0-59"),
        ("0 24 * * *", "24 0-23"),
        ("0 0 0 * *", "1-31"),
        ("0 0 * 13 *", "13 1-12"),
        ("0 0 * * 7", "Sunday 0"),
        ("0 0 * * 5-7", "Sunday 0"),
        ("0 0 * * frid", "0-6 frid"),
        ("0 0 * * 5L", "5L"),
        ("5/10 * * * *", "5-59/10"),
        ("30-10 * * * *", "30-10"),
        ("*/90 * * * *", "*/90"),
        ("*/0 * * * *", "*/0"),
        ("1,,2 * * * *", "minute"),
        ("? * * * *", "?"),
        ("0 0 31 feb,apr *", "31"),
    ],
)
def test_what_one_of_the_three_would_refuse_or_misread_is_explained(typed: str, message: str) -> None:
    with pytest.raises(ValueError, match=names(message)):
        parse_cron(typed)
