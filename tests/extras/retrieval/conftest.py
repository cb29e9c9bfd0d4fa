"""Fixtures that the end-to-end tests of users and items have too."""

from tests.end_to_end.conftest import user_item_data, user_item_run  # noqa: F401
