"""Training on raw rows that keep arriving: equal to training on the prepared rows, killed and resumed, and errors."""

import gzip
import json
import os
import random
import re
import resource
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from confluent_kafka import Producer

from distembed.base.errors import RunError, TemporaryFailure, UserError
from distembed.data import remote
from distembed.data.prepare.table import inputs
from distembed.data.stream import folder, journal, kafka
from distembed.data.stream import source as source_module
from distembed.data.stream.folder import FolderSource
from distembed.data.stream.journal import Journal
from distembed.data.table.schema import TableSchema
from tests.robustness.s3_server import reached_s3
from tests.small_runs import call, distembed, metrics, run_command
from tests.small_runs import write_dataset as write_dataset_without_raw_rows
from tests.training.stream_runs import (
    IDLE,
    SCHEMA,
    Row,
    draw_rows,
    follow,
    kafka_broker,
    require_equal,
    send,
    start_run,
    tansu_broker,
    wait_for_steps,
    write_file,
    write_files,
)

NUM_KILLS = 7


@pytest.mark.parametrize(
    "ranks, suffix",
    [(1, ".parquet"), (1, ".csv"), (1, ".jsonl"), pytest.param(2, ".parquet", marks=pytest.mark.distributed)],
)
def test_a_stream_gives_the_weights_and_the_metrics_of_the_prepared_rows(
    config: Path, ordered: list[Row], trained: Path, tmp_path: Path, ranks: int, suffix: str
) -> None:
    source, run = write_files(tmp_path / "rows", ordered, 3, suffix), tmp_path / "run"
    distembed("train", config, "--follow", source, *IDLE, "--run-dir", run, ranks=ranks)
    if ranks == 1:
        require_equal(run, trained)
    else:
        distembed("train", config, "--run-dir", tmp_path / "two", ranks=2)
        require_equal(run, tmp_path / "two")
    lines, prepared = metrics(run, "train"), metrics(trained, "train")
    assert [line["samples"] for line in lines] == [line["samples"] for line in prepared]
    assert [line["auc"] for line in lines] == pytest.approx([line["auc"] for line in prepared], abs=1e-3)
    if ranks == 1:
        assert [line["loss"] for line in lines] == [line["loss"] for line in prepared]
    rows = [line["samples"] - before["samples"] for before, line in zip([{"samples": 0}, *lines], lines, strict=False)]
    mean = sum(line["loss"] * count for line, count in zip(lines, rows, strict=True)) / sum(rows)
    assert lines[-1]["cumulative_loss"] == pytest.approx(mean, rel=1e-6)
    assert len(metrics(run, "eval")) == 2  # of the validation split at the end, and of the test split


@pytest.mark.thorough
def test_objects_of_a_store_are_rows_too(config: Path, ordered: list[Row], trained: Path, tmp_path: Path) -> None:
    run, names = tmp_path / "run", [f"part-{number}.parquet" for number in range(4)]
    files, bounds = tmp_path / "files", (0, 448, 896, 1280, len(ordered))  # the first two are 14 steps
    files.mkdir()
    for name, start, stop in zip(names, bounds, bounds[1:], strict=False):
        write_file(files / name, ordered[start:stop])
    refused = tmp_path / "refused"
    with reached_s3(tmp_path, share=0.02) as bucket:
        remote.upload(files / names[0], f"{bucket}/rows/{names[0]}")
        remote.upload(config, f"{bucket}/rows/notes.md")
        (process,) = start_run(1, config, f"{bucket}/rows", run, "--until-idle", "3", "data.stream.poll_seconds=0.2")
        wait_for_steps(run, [process], 2)
        refused.write_text("503 /")  # the store is down for a while
        time.sleep(4)
        refused.unlink()
        remote.upload(files / names[1], f"{bucket}/rows/{names[1]}")
        process.join()
        assert process.exitcode == 0, (tmp_path / "errors").read_text()
        assert metrics(run, "train")[-1]["samples"] == 896
        for name in names[2:]:
            remote.upload(files / name, f"{bucket}/rows/{name}")
        for start, error in (
            ("/bucket", "cannot be listed.*Forbidden"),
            (f"/bucket/rows/{names[2]}", "cannot be read"),
        ):
            refused.write_text(f"403 {start}")
            with pytest.raises((UserError, RunError), match=error):
                follow(config, f"{bucket}/rows", run, "--resume")
        refused.unlink()
        follow(config, f"{bucket}/rows", run, "--resume")
        require_equal(run, trained)
        assert "bad_files" not in metrics(run, "train")[-1]
        refused.write_text(f"404 /bucket/rows/{names[1]}")  # gone since it was listed
        said = follow(config, f"{bucket}/rows", tmp_path / "without")
        assert f"{names[1]} is left out" in said
        assert metrics(tmp_path / "without", "train")[-1]["bad_files"] == 1


@pytest.mark.thorough
@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".jsonl.gz"])
def test_an_object_is_read_on_once_its_store_answers_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    for module, name in ((remote, "_BLOCK_BYTES"), (remote, "_COPY_BYTES"), (inputs, "PIECE_BYTES")):
        monkeypatch.setattr(module, name, 2000)
    monkeypatch.setattr(folder, "_PART_BYTES", 10_000)
    monkeypatch.setattr(folder, "_BLOCK_BYTES", 3000)
    monkeypatch.setattr(remote, "FIRST_WAIT_SECONDS", 0.01)
    path, refused = tmp_path / f"part-0{suffix}", tmp_path / "refused"
    write_file(tmp_path / f"part-0{suffix.removesuffix('.gz')}", draw_rows(3000))
    if suffix == ".jsonl.gz":
        path.write_bytes(gzip.compress((tmp_path / "part-0.jsonl").read_bytes()))
    with reached_s3(tmp_path, share=0) as bucket:
        remote.upload(path, f"{bucket}/rows/{path.name}")
        source = FolderSource(f"{bucket}/rows", TableSchema.from_json(SCHEMA, "test"))
        (piece,) = source.new_pieces()
        undisturbed: list[Any] = list(source.blocks(piece))
        found, num_waits = list[Any](), 0
        refused.write_text("503 /")
        for block in source.blocks(piece):
            if block is None:
                num_waits += 1
                refused.unlink()
            else:
                found.append(block)
                refused.write_text("503 /")
        assert num_waits > 1
        given, expected = (
            [(part, *(values.tobytes() for values in block.numbers)) for part, block in blocks]
            for blocks in (found, undisturbed)
        )
        assert given == expected
        monkeypatch.setattr(source_module, "GONE_SECONDS", 0.0)
        with pytest.raises(TemporaryFailure, match="rows: no answer for 0 s .*--resume"):
            list(source.blocks(piece))
        refused.unlink()
        path.write_bytes(path.read_bytes()[::-1])
        remote.upload(path, f"{bucket}/rows/{path.name}")
        with pytest.raises(UserError, match="has changed since it was found: version .* then, .* now"):
            list(source.blocks(piece))


def test_malformed_and_late_rows_are_counted_and_the_rest_is_trained(config: Path, tmp_path: Path) -> None:
    source, rows = tmp_path / "rows", draw_rows(300)
    write_files(source, rows[:200], 2, ".jsonl")
    (source / "part-0.jsonl").write_text((source / "part-0.jsonl").read_text() + '{"click": 7}\nno row\n')
    (source / "part-4.parquet").write_bytes(b"PAR1 no Parquet PAR1")
    said = follow(config, source, tmp_path / "run")
    assert "row 100" in said and "row 101" in said and "part-4.parquet" in said
    write_file(source / "part-2.jsonl", rows[200:])
    said = follow(config, source, tmp_path / "run", "--resume")
    assert "late" in said and "part-2.jsonl" in said
    last = metrics(tmp_path / "run", "train")[-1]
    assert {name: last[name] for name in ("samples", "rejected_rows", "bad_files", "late_rows")} == {
        "samples": 300,
        "rejected_rows": 2,
        "bad_files": 1,
        "late_rows": 100,
    }
    with pytest.raises(UserError, match=r"1 files .* more than data.stream.max_bad_files=0"):
        follow(config, source, tmp_path / "strict", "data.stream.max_bad_files=0")


def test_too_many_malformed_rows_end_the_run(config: Path, tmp_path: Path) -> None:
    source = write_files(tmp_path / "rows", [*draw_rows(900), *({**row, "click": 7} for row in draw_rows(200))], 2)
    with pytest.raises(UserError, match=r"200 of 1,\d+ rows .* malformed, more than data.stream.max_rejected=0.1"):
        follow(config, source, tmp_path / "run", "data.stream.max_rejected=0.1", "train.checkpoint_every=0")
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert saved == ["step-00000008-interrupted"]  # of the first file's 550 rows
    follow(config, source, tmp_path / "lenient", "data.stream.max_rejected=0.2")


def test_a_stream_ends_at_its_rows_and_goes_on(config: Path, tmp_path: Path) -> None:
    source = write_files(tmp_path / "rows", draw_rows(500), 2)
    evaluates = "train.evaluate_every=3"
    follow(config, source, tmp_path / "once", "--max-rows", "384", evaluates)
    follow(config, source, tmp_path / "twice", "--max-rows", "192", evaluates)
    follow(config, source, tmp_path / "twice", "--max-rows", "384", evaluates, "--resume")
    evaluations = [(line["step"], line["split"]) for line in metrics(tmp_path / "once", "eval")]
    assert evaluations == [(3, "validation"), (6, "validation"), (6, "test")]
    require_equal(tmp_path / "once", tmp_path / "twice")
    assert metrics(tmp_path / "twice", "train")[-1]["samples"] == 384
    with pytest.raises(UserError, match="was trained on a stream; give --follow"):
        call("train", config, "--run-dir", tmp_path / "once", "--resume")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.distributed)])
def test_sigterm_saves_while_a_stream_waits_for_rows(config: Path, tmp_path: Path, ranks: int) -> None:
    source, run, rows = tmp_path / "rows", tmp_path / "run", draw_rows(400)
    write_files(source, rows[:200], 1)
    processes = start_run(ranks, config, source, run)
    wait_for_steps(run, processes, 3)
    for process in processes:
        os.kill(process.pid, signal.SIGTERM)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [75] * ranks
    write_file(source / "part-1.parquet", rows[200:])
    distembed("train", config, "--follow", source, *IDLE, "--run-dir", run, "--resume", ranks=ranks)
    distembed("train", config, "--follow", source, *IDLE, "--run-dir", tmp_path / "whole", ranks=ranks)
    require_equal(run, tmp_path / "whole")


def test_a_full_disk_ends_a_run_and_costs_no_row(config: Path, tmp_path: Path) -> None:
    source, run, rows = tmp_path / "rows", tmp_path / "run", draw_rows(2000)
    write_files(source, rows[:200], 1)
    (process,) = start_run(1, config, source, run)
    wait_for_steps(run, [process], 3)
    while not (blocks := run / "checkpoints/step-00000002/rank-0.blocks").exists():
        time.sleep(0.02)
    most = blocks.stat().st_size - 1  # larger than all other files
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, most))
    write_file(source / "part-1.parquet", rows[200:])
    process.join()
    assert process.exitcode == 1
    said = (tmp_path / "errors").read_text()
    assert re.search(r"step-\d+ could not be written .*--resume", " ".join(said.split())), said
    follow(config, source, run, "--resume")
    follow(config, source, tmp_path / "whole")
    require_equal(run, tmp_path / "whole")
    steps = [(line["step"], line["samples"]) for line in metrics(run, "train")]
    assert steps == [(line["step"], line["samples"]) for line in metrics(tmp_path / "whole", "train")]


def test_a_journal_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    found = Journal(tmp_path)
    (tmp_path / "stream.jsonl").symlink_to("/dev/full")
    with pytest.raises(
        TemporaryFailure, match="stream.jsonl cannot be written: No space left.*make room, and --resume"
    ):
        found.add([{"file": "a"}])
    assert found.pieces == []


class Arriving(threading.Thread):
    """Sends a stream's rows, a part at a time: to a folder, or to three partitions of a topic at unequal rates.

    Attributes:
        placed: The rows of each file or partition.
    """

    def __init__(self, rows: Sequence[Row], target: Path | Producer) -> None:
        super().__init__()
        self._rows, self._to = rows, target
        self.placed: dict[object, list[Row]] = {}

    def run(self) -> None:
        for number, start in enumerate(range(0, len(self._rows), 250)):
            self._send(number, self._rows[start : start + 250])
            time.sleep(0.3)

    def _send(self, number: int, rows: Sequence[Row]) -> None:
        place: object = f"part-{number}.parquet"
        if isinstance(self._to, Path):
            write_file(self._to / str(place), rows)
        else:
            place = (0, 0, 0, 0, 1, 1, 2)[number % 7]
            # the last message comes by itself: Tansu 0.6 says that a partition ends with the first one of a batch
            for part in (rows[:-1], rows[-1:]):
                send(self._to, "clicks", part, place)
        self.placed.setdefault(place, []).extend(rows)

    def rows_in_order(self, run: Path) -> list[Row]:
        """Returns the rows in the order of a run's pieces."""
        numbered: dict[int, Any] = dict(json.loads(line) for line in (run / "all.jsonl").read_text().splitlines())
        pieces = [numbered[number] for number in range(Journal(run).stop)]
        places = [self.placed[piece["partition"] if "partition" in piece else piece["file"]] for piece in pieces]
        return [
            row
            for rows, piece in zip(places, pieces, strict=True)
            for row in rows[piece.get("start", 0) : piece.get("stop")]
        ]


def run_with_short_journal(*arguments: Any) -> None:
    """Runs a command whose journal drops small pieces soon; the file ``all.jsonl`` keeps their numbers."""
    journal._PIECES_BETWEEN_DROPS, kafka._MOST_MESSAGES = 7, 50
    add = Journal.add

    def add_and_keep(self: Journal, pieces: Sequence[Any]) -> None:
        with (self._path.parent / "all.jsonl").open("a") as file:
            file.write("".join(f"{json.dumps(numbered)}\n" for numbered in enumerate(pieces, self.stop)))
        add(self, pieces)

    Journal.add = add_and_keep  # type: ignore[method-assign]
    run_command(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "librdkafka", "tansu"])
def test_a_killed_stream_trains_each_row_once_in_the_order_of_its_journal(
    config: Path, tmp_path: Path, kind: str
) -> None:
    rows, rng, run = draw_rows(6000, seed=1), random.Random(0), tmp_path / "run"
    (tmp_path / "rows").mkdir()
    with tansu_broker(tmp_path) if kind == "tansu" else kafka_broker() as (address, producer):
        producer.list_topics("clicks", timeout=10)  # which makes the topic
        source = tmp_path / "rows" if kind == "folder" else f"kafka://{address}/clicks"
        arriving = Arriving(rows, tmp_path / "rows" if kind == "folder" else producer)
        arriving.start()
        with_dropped = 0
        for killed in range(NUM_KILLS):
            (process,) = start_run(
                1, config, source, run, "data.stream.poll_seconds=0.2", command=run_with_short_journal
            )
            wait_for_steps(run, [process], 8 * (killed + 1))
            time.sleep(rng.random())
            process.kill()
            process.join()
            with_dropped += "dropped" in (run / "stream.jsonl").read_text()
        arriving.join()
        (process,) = start_run(1, config, source, run, *IDLE, command=run_with_short_journal)
        process.join()
        assert process.exitcode == 0, (tmp_path / "errors").read_text()
    assert with_dropped >= (0 if kind == "folder" else 2)  # resumed runs whose journals lack their first pieces
    ordered = arriving.rows_in_order(run)
    assert sorted(map(repr, ordered)) == sorted(map(repr, rows))
    assert metrics(run, "train")[-1]["samples"] == len(rows)
    follow(config, write_files(tmp_path / "ordered", ordered, 1), tmp_path / "whole")
    require_equal(run, tmp_path / "whole")


def test_a_file_is_read_once_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    source = FolderSource(str(tmp_path), TableSchema.from_json(SCHEMA, "test"))
    table = pa.table({"click": [1]})
    pq.write_table(table, tmp_path / "b.parquet")
    whole = (tmp_path / "b.parquet").read_bytes()
    for name, content in (("a.parquet", whole[:-9]), (".c.parquet", whole), ("_d.parquet", whole), ("e.md", b"")):
        (tmp_path / name).write_bytes(content)

    def found(seconds: float) -> list[str]:
        now[0] += seconds
        return [piece["file"] for piece in source.new_pieces()]

    assert found(0) == [] and source.is_pending
    assert found(2) == ["b.parquet"] and source.is_pending
    (tmp_path / "a.parquet").write_bytes(whole)  # its writer goes on
    assert found(2) == [] and found(2) == ["a.parquet"] and not source.is_pending
    (tmp_path / "f.parquet").write_bytes(whole[:-9])
    assert found(2) == found(30) == [] and found(40) == ["f.parquet"]  # its writer has died


def test_a_journal_drops_the_line_that_a_killed_process_has_not_finished(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.add([{"file": "a"}, {"file": "b"}])
    with (tmp_path / "stream.jsonl").open("a") as file:
        file.write('{"file": "c')
    assert Journal(tmp_path).pieces == journal.pieces
    Journal(tmp_path).add([{"file": "d"}])
    assert [piece["file"] for piece in Journal(tmp_path).pieces] == ["a", "b", "d"]


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
def test_a_resumed_run_begins_with_the_part_that_its_checkpoint_is_in(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(folder, "_PART_BYTES", 1000)
    rows = [*({**row, "day": "no day"} for row in draw_rows(3)), *draw_rows(600)]  # three malformed ones in part 1
    rows = [{**row, "day": str(row["day"])} for row in rows]
    source, run = write_files(tmp_path / "rows", rows, 1, suffix), tmp_path / "run"
    follow(config, source, tmp_path / "whole")
    follow(config, source, run, "--max-rows", "384")
    path = source / f"part-0{suffix}"
    content = bytearray(path.read_bytes())
    head = content.index(b"\n") + 1 if suffix != ".parquet" else 4
    size = int(0.3 * len(content))
    content[head : head + size] = b"?" * size  # which nobody reads again
    path.write_bytes(content)
    follow(config, source, run, "--resume")
    require_equal(run, tmp_path / "whole")
    last, whole = metrics(run, "train")[-1], metrics(tmp_path / "whole", "train")[-1]
    assert last["samples"] == whole["samples"] == 600
    assert last["rejected_rows"] == whole["rejected_rows"] == 3


def test_a_journal_keeps_the_names_of_files_and_the_last_offsets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_PIECES_BETWEEN_DROPS", 7)
    rng, pieces, kept = random.Random(0), list[dict[str, int]](), Journal(tmp_path)

    def last_of_each(known: Sequence[Any]) -> Sequence[Any]:
        return list({piece["partition"]: piece for piece in known}.values())

    for _ in range(100):
        new = [{"partition": rng.randrange(3), "stop": len(pieces) + number} for number in range(rng.randrange(4))]
        kept.add(new)
        pieces += new
        if kept.is_long:
            kept.drop_before(rng.randrange(kept.first, kept.stop + 1), rng.choice([last_of_each, list]))
        kept = Journal(tmp_path) if rng.random() < 0.2 else kept
        assert kept.stop == len(pieces) and kept.pieces == pieces[kept.first :]
        assert sorted(map(repr, kept.summary)) == sorted(map(repr, last_of_each(pieces[: kept.first])))
    assert kept.first > 20


def test_a_read_error_that_may_pass_keeps_the_file_for_a_resumed_run(config: Path, tmp_path: Path) -> None:
    source, run = write_files(tmp_path / "rows", draw_rows(200), 2), tmp_path / "run"
    (source / "part-2.jsonl").symlink_to("/proc/self/mem")  # a regular file, whose reading is an input/output error
    with pytest.raises(TemporaryFailure, match=r"part-2.jsonl cannot be read now: Input/output error.*--resume"):
        follow(config, source, run)
    (source / "part-2.jsonl").unlink()
    (source / "part-2.jsonl").touch()  # of equal size, as when the disk answers again
    follow(config, source, run, "--resume")
    follow(config, source, tmp_path / "whole")
    require_equal(run, tmp_path / "whole")
    assert "bad_files" not in metrics(run, "train")[-1]


def test_errors_say_what_to_do(config: Path, tmp_path: Path) -> None:
    run, rows = tmp_path / "run", write_files(tmp_path / "rows", draw_rows(100), 1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="is no folder; make it first"):
        follow(config, tmp_path / "missing", run)
    with pytest.raises(UserError, match="web servers list no files; give a folder"):
        follow(config, "http://127.0.0.1/rows", run)
    with pytest.raises(UserError, match=r"no row came from .*empty .*until_idle=0.4 seconds"):
        follow(config, tmp_path / "empty", run)
    with pytest.raises(UserError, match="by the schema of data.path"):
        other = write_dataset_without_raw_rows(tmp_path / "other")
        follow(config, rows, tmp_path / "run2", f"data.path={json.dumps(str(other))}")
    with pytest.raises(UserError, match=r"schedule follows the number of steps.* data.stream.max_rows"):
        follow(config, rows, tmp_path / "run2", "train.dense_optimizer.schedule.decay=linear")
    with pytest.raises(UserError, match="train.epochs is 2"):
        follow(config, rows, tmp_path / "run2", "train.epochs=2")
