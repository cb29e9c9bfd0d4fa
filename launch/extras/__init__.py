"""Support more schedulers: Volcano, Kubeflow, Ray, Argo, Airflow, Docker Compose, cron and
scrontab.

Each module registers what it renders in launch.targets, which imports this package if it exists.
"""

from launch.extras import airflow, argo, compose, crontab, operators

__all__ = ["airflow", "argo", "compose", "crontab", "operators"]
