"""Write docs/reference.md, every key of every verb:  python docs/write_reference.py"""

from __future__ import annotations

from pathlib import Path

from pipeline.cli.reference import Key, keys_of, model_keys
from pipeline.cli.verbs import import_verbs
from pipeline.config.jobs.names import CONFIG_NAMES
from pipeline.config.jobs.train import PlanJob, TrainJob
from pipeline.config.registry import components

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference.md"
HEAD = """# Every key

<!-- written by python docs/write_reference.py from the schemas and the comments of conf/ -->

`-h KEY` behind a verb prints what this page says of a key or a section: `python -m pipeline.train -h trainer.seed`. A default is that
of the group's default option; `--cfg` prints the job that a command line makes. `<name>` stands for a table, feature or column, or
a pattern such as `cat_*`. [Config](config.md) says how options and values are set.
"""


def render() -> str:
    import_verbs()
    conf = ROOT / "conf"
    trained = keys_of(TrainJob, "train", conf)
    sections: dict[str, list[Key]] = {"train and plan": [key for key in trained if "." not in key.name]}
    for key in trained:
        if "." in key.name and not key.name.startswith("model."):
            sections.setdefault(key.name.partition(".")[0], []).append(key)
    sections |= {
        f"model={kind}": keys for kind, keys in model_keys(conf).items() if _is_ours(components("model")[kind])
    }
    known = {key.name for key in trained}
    # By name: which verbs were imported first does not change the page.
    for job, verb in sorted(CONFIG_NAMES.items(), key=lambda pair: pair[1]):
        if job not in (TrainJob, PlanJob) and _is_ours(job):
            own = [key for key in keys_of(job, verb, conf) if key.name not in known or "." not in key.name]
            sections[verb] = [key for key in own if not key.name.startswith("model.")]
    return HEAD + "".join(f"\n## {name}\n\n{_table(keys)}" for name, keys in sections.items() if keys)


def _is_ours(kind: type) -> bool:
    """And no plugin's, which the process may have loaded."""
    return kind.__module__.startswith("pipeline.")


def _table(keys: list[Key]) -> str:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key in keys:
        default = f"`{_cell(key.default)}`" if key.default not in ("", "[") else ""
        lines.append(f"| `{key.name}` | {key.kind} | {default} | {_cell(key.meaning)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(render())
