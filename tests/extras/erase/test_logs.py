"""A serving log in a folder that is erased loses the rows of a value, and all its other scores are computed again, to the bit."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.cli.command_line import load_config
from pipeline.extras.erase.config import EraseJob
from pipeline.extras.erase.plain_files import erase_from_file
from pipeline.extras.erase.run import erase
from pipeline.extras.erase.scan import found_in
from pipeline.extras.erase.target import Target
from pipeline.extras.serving_log.job import JoinLabelsJob, SkewJob
from pipeline.extras.serving_log.join import join_labels
from pipeline.extras.serving_log.log_files import About, log_paths, read_log
from pipeline.extras.serving_log.skew import describe, skew
from pipeline.extras.serving_log.writer import LogWriter
from pipeline.runtime.storage.signature import requiring
from tests.extras.erase.test_erase import holding, pristine, rows_of_user, words_of, world  # noqa: F401
from tests.extras.erase.worlds import NAMES, USER
from tests.serving.servers import running


def serve_and_ask(artifact: Path, folder: Path, users: list[list[str]]) -> None:
    """One request for each list of users; the log is complete after it."""
    with running("pipeline serve", f"artifact={artifact}", "server.port=0", f"observers.log.folder={folder}") as server:
        for number, names in enumerate(users):
            rows = [{"price": 0.1 * place, "user": name, "item": f"i{number % 24}"} for place, name in enumerate(names)]
            answer = server.client.post(f"{server.url}/score", json={"rows": rows})
            assert answer.status_code == 200, answer.text
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_a_log_row_leaves_if_its_list_has_the_value_and_half_a_file_is_named(tmp_path: Path) -> None:
    table = pa.table({"user": ["u1", "u2", "u3"], "history": [["i1", "i7"], ["i1"], []], "log.row": [0, 1, 2]})
    writer = LogWriter(str(tmp_path), 9, 1.0, 1 << 30)
    writer.add(About("v", "run", ["user", "history"], [], [], ["score"]), table)
    writer.flush()
    (path,) = tmp_path.iterdir()
    target = Target("item", "i7", sharing={"history"})
    (half := tmp_path / "half.parquet").write_bytes(path.read_bytes()[:-9])
    assert erase_from_file(target, str(path)) and not erase_from_file(target, str(half))
    assert pq.read_table(path)["user"].to_pylist() == ["u2", "u3"] and not found_in(target, str(path))
    assert "cannot be decoded" in found_in(target, str(half))
    assert erase_from_file(Target("user", "u2"), str(path)) and erase_from_file(Target("user", "u3"), str(path))
    assert pq.read_table(path).num_rows == 0 and list(read_log(str(path))) == []


@pytest.mark.campaign
def test_a_serving_log_is_erased_and_its_other_scores_are_reproduced(world: Path) -> None:  # noqa: F811
    folder, artifact = world / "logs/serving", world / "artifact"
    mixed = [[NAMES[(7 * number + place) % 24] for place in range(1 + number % 4)] for number in range(60)]
    serve_and_ask(artifact, folder, [*mixed, [USER, NAMES[3], "never seen"]])
    serve_and_ask(artifact, folder, [[USER], [USER, USER]])  # all rows of a file
    served = sum(map(len, mixed)) + 6
    words = [f"artifact={artifact}", f"log={folder}", f"data_path={world}/ds", "max_psi=9"]
    before = skew(load_config(SkewJob, words))
    assert before["passed"] and before["rows"] == served and len(log_paths(str(folder))) == 2
    join = [f"log={folder}", f"output={world}/logs/joined", f"labels={world}/logs/labels.csv", "window_s=1"]
    (world / "logs/labels.csv").write_text("request_id,row,label,time\nnone,0,1,5\n")
    join_labels(load_config(JoinLabelsJob, [*join, "now=1e11"]))

    patterns = rows_of_user(world) | {USER.encode()}
    assert sum("logs" in path.parts for path in holding(world, patterns)) >= 5
    (unfinished := folder / "1.parquet.unfinished").write_bytes(Path(log_paths(str(folder))[0]).read_bytes()[:-20])
    result = erase(load_config(EraseJob, words_of(world)))
    assert list(result.left) == [str(unfinished)] and result.record == 0
    unfinished.unlink()
    result = erase(load_config(EraseJob, words_of(world)))
    assert result.left == {} and result.record and holding(world, patterns) == []

    others = sum(name != USER for names in mixed for name in names) + 2
    with requiring(f"{world}/keys/key.pub"):
        after = skew(load_config(SkewJob, words))
    assert after["passed"], describe(after)
    assert after["rows"] == after["replay"]["equal_scores"] == after["replay"]["equal_rows"] == others
    assert sum(pq.read_table(path).num_rows for path in (world / "logs/joined").glob("*.parquet")) == others
    shutil.rmtree(world / "logs/joined")
    assert join_labels(load_config(JoinLabelsJob, [*join, "now=1e11"])).rows == others
